"""The state that a client stores between rounds."""

import pytest
import torch

from client_app.state import ClientState


def test_the_last_two_rounds_with_the_client_are_kept(tmp_path):
    """The client misses round 2; if round 3 is lost, its optimizer of round 1 is used."""
    state = ClientState(str(tmp_path), "lineage", "alpha")
    for number in (1, 3):
        state.forget_from(number)
        value = {"weight": torch.full((2,), float(number))}
        state.save(number, value, value)
    (state.directory / "round-0002.bak").mkdir()
    state.forget_from(3)
    assert state.optimizer(2)["weight"].tolist() == [1.0, 1.0]
    for number in (3, 4):
        state.save(number, value, value)
    assert state.adapter(2) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"id": "1"}', '{"round": 1, "x": 2}'])
def test_a_damaged_private_round_begins_anew(tmp_path, content):
    state = ClientState(str(tmp_path), "run", "court")
    assert state.private_round() is None
    state.directory.mkdir(parents=True)
    state.private_round_file.write_text(content)
    assert state.private_round() is None
