"""What tests of FL-GLM's strategy share."""

import pytest


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
