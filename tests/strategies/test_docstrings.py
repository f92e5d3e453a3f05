"""The example in the docstring of ``Rounds`` runs."""

import doctest

from strategies import rounds
from tests.in_process import MemoryJournal
from tests.strategies.grids import SpyingGrid


def test_rounds_of_three_clients(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "rounds": 1, "state-path": str(tmp_path)}
    (example,) = doctest.DocTestFinder(recurse=False).find(rounds.Rounds, "Rounds", rounds)
    names = {"values": values, "grid": SpyingGrid(values), "journal": MemoryJournal()}
    example.globs = vars(rounds) | names
    result = doctest.DocTestRunner().run(example)
    assert result.attempted == 10 and not result.failed
