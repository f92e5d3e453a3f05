"""Threads that load models at the same time."""

import threading

import torch

from finetuning.adapters.adapter import initial_adapter
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings


def test_threads_leave_the_default_data_type_as_it_was(checkpoint):
    """Creating an initial adapter and loading a model both change it temporarily."""
    settings = AdapterSettings(targets="q_proj,v_proj")

    def work() -> None:
        for seed in range(5):
            initial_adapter(str(checkpoint), settings, seed)
            load_base_model(ModelSettings(name=str(checkpoint), dtype="float32"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() is torch.float32
