"""A body on its own, and the results of training it with two branches that take turns."""

import torch

from finetuning.settings import ModelSettings, TrainSettings
from split.model.loading import load_parts
from split.model.partition import Partition
from split.protocol.frames import Padding
from split.server.body_adapters import BodyAdapters
from tests.split.clients import ADAPTER
from tests.split.conftest import LENGTHS

DROPOUT = ADAPTER.model_copy(update={"dropout": 0.3})
TRAIN = TrainSettings(learning_rate=1e-2, max_gradient_norm=0.1)


def load_body(directory, quantization="none", checkpointing=False, dtype="float32"):
    settings = ModelSettings(
        name=str(directory),
        dtype=dtype,
        quantization=quantization,
        gradient_checkpointing=checkpointing,
    )
    return load_parts(settings, directory, Partition(6, 1, 1), ["body"], ["cpu"])["body"]


def train_branches(body, adapter):
    """Train two branches in turn, as separate lanes do; return all results."""
    torch.manual_seed(0)
    width = body.hidden_size
    given = [0.5 * torch.randn(3, 11, width) for _ in range(2)]
    branches, results = [], []
    for number in range(2):
        body.attach(adapter, "shapes")
        shapes = {name: value.shape for name, value in body.trainable("shapes").items()}
        body.remove("shapes")
        generator = torch.Generator().manual_seed(number)
        state = {n: 0.2 * torch.randn(s, generator=generator) for n, s in shapes.items()}
        branches.append(BodyAdapters(body=body, adapter=adapter, train=TRAIN, state=state))
    for step, side in enumerate(["right", "left"]):
        graphs = [
            branch.run_blocks(hidden, Padding(side, LENGTHS), 7 + step, True).result()
            for branch, hidden in zip(branches, given, strict=True)
        ]
        for branch, graph in zip(branches, graphs, strict=True):
            gradient = branch.propagate_back(graph, graph.output.detach().cos()).result()
            results += [graph.output.detach(), gradient]
            results += [value.grad.clone() for value in branch.parameters.values()]
        for branch in branches:
            results.append(torch.tensor(branch.clip(1.0)))
            branch.step(step, 2)
    for branch in branches:
        results += [*branch.export().values(), *branch.export_optimizer().values()]
        body.remove(branch.name)
    assert len(results) > 20
    return results
