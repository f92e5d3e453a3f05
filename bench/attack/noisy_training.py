"""Cost of noise on hidden states: a split model's held-out loss, before and after training.

The real client and block server run in one process, connected by real lanes.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.attack.texts import Texts
from bench.job import (
    LIFETIME,
    Course,
    Shape,
    TrainingJob,
    join_round,
    load_client_parts,
    load_server_part,
    open_model,
    start_block_server,
)
from finetuning.adapters.adapter import State
from finetuning.evaluation.held_out import held_out_loss
from finetuning.settings import AdapterSettings
from split.client.split_model import SplitModel
from split.model.adapters import join_adapters, take_apart
from split.model.partition import PartyName
from split.protocol.tickets import Invitation
from split.settings import SplitSettings

_CLIENT = "attacked"
_ROWS = 4
_LEARNING_RATE = 1e-3
CLIENT_ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="")


def train_with_noise(
    directory: Path, texts: Texts, noise: float, seed: int
) -> tuple[dict[str, float], State]:
    """Train a split model in steps of 4 rows; its head and tail have one block each.

    The noise is on all hidden states that the client sends. The seed determines the initial adapter
    and the order of the examples. Return the held-out losses before and after training, which are
    measured with the noise, too, and the adapter of the whole model.
    """
    split = SplitSettings(head_blocks=1, tail_blocks=1)
    steps, held_out = texts.sizes.steps, texts.attacked[: texts.sizes.measured]
    training = random.Random(seed).sample(texts.own, len(texts.own))
    columns = max(len(example.tokens) for example in (*training, *held_out))
    job = TrainingJob(
        directory=directory,
        shape=Shape(rows=_ROWS, columns=columns, micro_batches=1),  # other fields are unused
        steps=steps,
        examples=lambda _: training,
        adapter=CLIENT_ADAPTER,
        learning_rate=_LEARNING_RATE,
        seed=seed,
    )
    body, ends = load_server_part(job, split), load_client_parts(job, split)
    initial = take_apart(job.state(), body.partition)

    @contextmanager
    def lane(invitation: Invitation) -> Iterator[SplitModel]:
        with open_model(ends, invitation, job, split, noise) as model:
            yield model
            model.end()

    with start_block_server(body=body, job=job, split=split, clients=1) as server:

        def loss(round_number: int, parts: dict[PartyName, State]) -> float:
            models = {"measured": parts["body"]}
            invitation = server.invite_to_evaluate(_CLIENT, round_number, models, LIFETIME)
            with lane(invitation) as model:
                model.choose("measured", parts["head"] | parts["tail"])
                return held_out_loss(model, held_out, texts.padding, _ROWS).loss

        loss_before = loss(0, initial)
        server.finish_lanes()
        server.begin_round({_CLIENT: len(training)}, seed)
        with lane(server.invite_to_train(_CLIENT, 1, seed, LIFETIME)) as model:
            join_round(model, job)
            Course(job, model, model.parameters, texts.padding).train(steps)
            own = {name: value.detach().clone() for name, value in model.parameters.items()}
        server.finish_lanes()
        adapter = join_adapters([own, server.end_round({_CLIENT: 1.0})])
        loss_after = loss(1, take_apart(adapter, body.partition))
    return {"loss_before": loss_before, "loss_after": loss_after}, adapter
