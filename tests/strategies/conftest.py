"""Shared fixtures for the tests of strategies."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def one_run():
    """Set the run with which Flower marks every message that this process creates."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


@pytest.fixture
def split_values(values, deep_checkpoint):
    """A run config with which a split model trains in seconds."""
    return split_config(values, deep_checkpoint)


def split_config(values, checkpoint):
    """Return a run config for FL-GLM; ``values`` is one for FedJudge."""
    return values | {
        "strategy": "fl-glm",
        "model.name": str(checkpoint),
        "rounds": 2,
        "train.optimizer-state": "keep",
        "split.wire-dtype": "float32",
    }
