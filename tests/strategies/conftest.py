"""What tests of FL-GLM's strategy share."""

import pytest


@pytest.fixture
def split_values(values, deep_checkpoint):
    """A run config with which a split model trains in seconds."""
    return values | {
        "strategy": "fl-glm",
        "model.name": str(deep_checkpoint),
        "rounds": 2,
        "train.optimizer-state": "keep",
        "split.wire-dtype": "float32",
    }
