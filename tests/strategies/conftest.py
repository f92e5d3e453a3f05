"""What the tests of strategies share."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def one_run():
    """Flower marks every message with the run of the process that creates it."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


@pytest.fixture
def split_values(values, deep_checkpoint):
    """A run config with which a split model trains in seconds."""
    return split_config(values, deep_checkpoint)


def split_config(values, checkpoint):
    """Return a run config of FL-GLM; ``values`` is one of FedJudge."""
    return values | {
        "strategy": "fl-glm",
        "model.name": str(checkpoint),
        "rounds": 2,
        "train.optimizer-state": "keep",
        "split.wire-dtype": "float32",
    }
