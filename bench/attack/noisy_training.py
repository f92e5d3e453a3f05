"""Cost of noise on hidden states: a split model's held-out loss, before and after training.

The real client and block server run in one process, connected by real lanes.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.job import LIFETIME, Job, join, load_body, load_ends, opened, serving
from bench.shape import Shape
from finetuning.adapters.adapter import State
from finetuning.data.tokenization import Example
from finetuning.evaluation.held_out import held_out_loss
from finetuning.settings import AdapterSettings
from finetuning.training.loop import train_round
from split.client.split_model import SplitModel
from split.model.adapters import join_adapters, take_apart
from split.model.partition import PartyName
from split.protocol.invitation import Invitation
from split.settings import SplitSettings

_CLIENT = "attacked"
_ROWS = 4
_LEARNING_RATE = 1e-3
ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="")


@dataclass(frozen=True)
class NoisyRun:
    """The result of training with noise.

    Attributes:
        loss_before: Held-out loss of the base model, with the noise.
        loss_after: Held-out loss of the trained model, with the noise.
        adapter: The trained adapter of the whole model.

    """

    loss_before: float
    loss_after: float
    adapter: State


def train_with_noise(
    directory: Path,
    training: Sequence[Example],
    held_out: Sequence[Example],
    steps: int,
    noise: float,
    seed: int,
    padding: int,
) -> NoisyRun:
    """Train a split model with one block at each end at the client.

    Args:
        directory: Directory of the checkpoint.
        training: The client's examples.
        held_out: Examples whose loss is measured.
        steps: Optimizer steps of 4 rows.
        noise: Noise on all hidden states that the client sends.
        seed: Seed of the initial adapter and of the order of the examples.
        padding: The padding token.

    """
    split = SplitSettings(head_blocks=1, tail_blocks=1)
    training = random.Random(seed).sample(list(training), len(training))
    columns = max(len(example.tokens) for example in (*training, *held_out))
    job = Job(
        directory=directory,
        shape=Shape.of_checkpoint(directory, _ROWS, columns),
        steps=steps,
        examples=lambda _: training,
        adapter=ADAPTER,
        learning_rate=_LEARNING_RATE,
        seed=seed,
    )
    body, ends = load_body(job, split), load_ends(job, split)
    initial = take_apart(job.state(), body.partition)

    def lane(invitation: Invitation) -> AbstractContextManager[SplitModel]:
        return opened(ends=ends, invitation=invitation, job=job, split=split, noise=noise)

    with serving(body=body, job=job, split=split, clients=1) as server:

        def loss(round_number: int, parts: dict[PartyName, State]) -> float:
            models = {"measured": parts["body"]}
            with lane(
                server.invite_to_evaluate(
                    client=_CLIENT, round_number=round_number, models=models, lifetime=LIFETIME
                )
            ) as model:
                model.choose("measured", parts["head"] | parts["tail"])
                return held_out_loss(model, held_out, padding, _ROWS).loss

        loss_before = loss(0, initial)
        server.finish_lanes()
        server.begin_round({_CLIENT: len(training)}, seed)
        with lane(
            server.invite_to_train(client=_CLIENT, round_number=1, seed=seed, lifetime=LIFETIME)
        ) as model:
            join(model, job)
            train_round(
                model=model,
                parameters=model.parameters,
                examples=training,
                padding=padding,
                local_round=job.local_round(),
                settings=job.train,
            )
            own = {name: value.detach().clone() for name, value in model.parameters.items()}
        server.finish_lanes()
        adapter = join_adapters([own, server.end_round({_CLIENT: 1.0})])
        loss_after = loss(1, take_apart(adapter, body.partition))
    return NoisyRun(loss_before, loss_after, adapter)
