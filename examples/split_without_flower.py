"""Train a model that is split between a client and a block server, without Flower (FL-GLM).

    python examples/split_without_flower.py [checkpoint] --output adapter

The server holds the middle blocks; the client holds the embedding, the first and last blocks and
the output head. Both run in this process and share nothing but the invitation, which a real
deployment sends to the client over a secure channel.
"""

import argparse
import time
from pathlib import Path

from finetuning.adapters.adapter import initial_adapter, load_state, save_adapter
from finetuning.data.rows import Row, parse_messages
from finetuning.data.tokenization import Example, tokenize
from finetuning.generated import examples
from finetuning.model.base_model import load_tokenizer, locate
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from split.client.split_model import SplitModel
from split.lane.dialling import open_lane
from split.model.adapters import join_adapters, take_apart
from split.model.loading import load_parts
from split.model.partition import partition_of
from split.protocol.frames import Limits
from split.protocol.training import RoundPlan
from split.server.block_server import BlockServer
from split.settings import SplitSettings

SEED = 0
STEPS = 6
SECONDS = 300.0
ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0)
SPLIT = SplitSettings(head_blocks=1, tail_blocks=1, wire_dtype="float32")
TRAIN = TrainSettings(batch_size=2, accumulation=2, local_steps=STEPS, learning_rate=5e-3)


def main() -> None:
    """Serve a round, train in it, and save the joined adapter in PEFT's format."""
    parser = argparse.ArgumentParser(description="Train a split model over a lane.")
    parser.add_argument(
        "checkpoint", nargs="?", default="tiny", help="absolute path or Hugging Face id"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the adapter")
    arguments = parser.parse_args()

    directory = locate(arguments.checkpoint)
    partition = partition_of(directory, SPLIT)
    state, config = initial_adapter(arguments.checkpoint, ADAPTER, SEED)
    initial = take_apart(state, partition)
    text = private_text(directory)
    columns = max(len(example.tokens) for example in text)
    # The largest micro-batch, in padded tokens: the server reserves memory for it.
    longest = TRAIN.batch_size * columns

    body = load_parts(
        settings=ModelSettings(), directory=directory, partition=partition, parties=["body"]
    )["body"]
    server = BlockServer(
        body=body,
        state=initial,
        split=SPLIT,
        adapter=ADAPTER,
        train=TRAIN,
        run="example",
        rounds=1,
        longest=longest,
        columns=columns,
        minimum=1,
    )
    try:
        server.begin_round({"client": len(text)}, SEED)
        invitation = server.invite_to_train(
            client="client", round_number=1, seed=SEED, lifetime=SECONDS
        )

        client_parts = load_parts(
            settings=ModelSettings(),
            directory=directory,
            partition=partition,
            parties=["head", "tail"],
        )
        for party, part in client_parts.items():
            part.attach(ADAPTER)
            load_state(part.trainable(), initial[party])
        limits = Limits(body.hidden_size, SPLIT.wire_dtype, longest, window=SPLIT.window)
        lane = open_lane(
            invitation, limits, time.monotonic() + SECONDS, resume_timeout=SPLIT.resume_timeout
        )
        model = SplitModel(
            head=client_parts["head"],
            tail=client_parts["tail"],
            lane=lane,
            frame_timeout=SPLIT.frame_timeout,
        )
        train(model, text, longest)
        trained_body = server.end_round({"client": 1.0})
    finally:
        server.stop()
    trained = join_adapters([model.parameters, trained_body])
    tensors = {name: value.detach() for name, value in trained.items()}
    save_adapter(
        directory=arguments.output, state=tensors, config=config, card="# Trained without Flower\n"
    )
    print(f"saved to {arguments.output}")


def private_text(directory: Path) -> list[Example]:
    """Return tokenized examples; here they are generated."""
    count = STEPS * TRAIN.batch_size * TRAIN.accumulation
    values = examples(style="consultation", count=count, seed=SEED, split="train")
    rows = [Row(parse_messages(value), f"row {n}", {}) for n, value in enumerate(values)]
    return tokenize(rows, load_tokenizer(directory), 256)[0]


def train(model: SplitModel, text: list[Example], longest: int) -> None:
    """Train for a round with the same loop as an unsplit model."""
    deadline = time.monotonic() + SECONDS
    plan = RoundPlan(steps=STEPS, first_step=0, total_steps=STEPS, seed=SEED)
    model.join(plan, longest=longest, deadline=deadline)
    size = TRAIN.batch_size * TRAIN.accumulation
    steps = [range(step * size, (step + 1) * size) for step in range(STEPS)]
    local_round = LocalRound(
        steps=steps, first_step=0, total_steps=STEPS, seed=SEED, deadline=deadline
    )
    report, _ = train_round(
        model=model,
        parameters=model.parameters,
        examples=text,
        padding=0,
        local_round=local_round,
        settings=TRAIN,
    )
    model.end()
    model.lane.close()
    for step, loss in enumerate(report.losses, start=1):
        print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
