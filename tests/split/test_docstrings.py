"""The examples in docstrings run."""

import doctest

from split.client import split_model
from split.server import block_server, compute


def run(names, *tests):
    """Run examples one after another with the same names."""
    for test in tests:
        test.globs = names
        result = doctest.DocTestRunner().run(test, clear_globs=False)
        assert result.attempted and not result.failed


def example_of(module, name):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name, module)
    return test


def test_jobs_of_a_compute_thread():
    run(vars(compute).copy(), example_of(compute, "ComputeThread"))


def test_a_server_and_its_client():
    server = example_of(block_server, "BlockServer")
    *serve, stop = server.examples
    server.examples = serve
    names = {}
    run(names, server, example_of(split_model, "SplitModel"))
    exec(stop.source, names)
