"""A run config with which the small checkpoint trains in seconds."""

from pathlib import Path

import pytest


@pytest.fixture
def values(checkpoint: Path, client_folders: Path) -> dict:
    return {
        "strategy": "fedjudge-cl",
        "rounds": 3,
        "min-nodes": 3,
        "model.name": str(checkpoint),
        "data.path": str(client_folders),
        "adapter.targets": "q_proj,k_proj,v_proj",
        "train.batch-size": 2,
        "train.accumulation": 2,
        "train.learning-rate": 5e-3,
        "evaluate.generate": False,
    }
