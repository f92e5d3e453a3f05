"""The weighted mean: the example in its docstring."""

import doctest

from finetuning.aggregation import weighted_mean


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(weighted_mean)
    assert result.attempted and not result.failed
