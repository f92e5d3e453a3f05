"""Which device is the default."""

import torch

from finetuning.devices import default_device


def test_apples_gpus_are_not_used(monkeypatch):
    mps = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: mps)
    assert default_device() == torch.device("cpu")
