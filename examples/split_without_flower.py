"""Train a model that is split (FL-GLM) between a client and a block server, without Flower.

    python examples/split_without_flower.py FOLDER [checkpoint]

Both parties run in this process, with the same settings, checkpoint and initial adapter. The
client gets an invitation from the server. The joined adapter is saved to FOLDER in PEFT's format.
"""

import sys
import time
from pathlib import Path

import split
from finetuning.adapters.adapter import initial_adapter, load_state, save_adapter
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.generated import examples
from finetuning.model.locating import locate
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round

STEPS, ROWS = 6, 4  # number of steps, and of rows per step
MODEL, ADAPTER = ModelSettings(), AdapterSettings(rank=4, alpha=16, dropout=0.0)
SPLIT = split.SplitSettings(head_blocks=1, tail_blocks=1, wire_dtype="float32")
TRAIN = TrainSettings(batch_size=2, accumulation=2, local_steps=STEPS, learning_rate=5e-3)


def main(folder: str, checkpoint: str = "tiny") -> None:
    """Serve a round, train in it, and save the joined adapter."""
    directory, deadline = locate(checkpoint), time.monotonic() + 300.0
    partition = split.partition_of(directory, SPLIT)
    state, peft_config = initial_adapter(checkpoint, ADAPTER, seed=0)
    initial = split.take_apart(state, partition)
    values = examples(style="consultation", count=STEPS * ROWS, seed=0, split="train")
    rows = [Row(parse_messages(value), f"row {n}", {}) for n, value in enumerate(values)]
    text, _ = tokenize(rows, load_tokenizer(directory), 256)
    columns = max(len(example.tokens) for example in text)
    max_batch_tokens = TRAIN.batch_size * columns
    with split.BlockServer(
        body=split.load_body(directory, MODEL, SPLIT),
        state=initial,
        split=SPLIT,
        adapter=ADAPTER,
        train=TRAIN,
        max_batch_tokens=max_batch_tokens,
        max_columns=columns,
    ) as server:
        server.begin_round({"client": len(text)}, seed=0)
        invitation = server.invite_to_train("client", round_number=1, seed=0, lifetime=300.0)
        # The client's part begins here.
        parts = split.load_parts(MODEL, directory, partition, ["head", "tail"])
        for party, part in parts.items():
            part.attach(ADAPTER)
            load_state(part.trainable(), initial[party])
        with split.connect(invitation, parts, SPLIT, max_batch_tokens, deadline) as model:
            model.join(split.RoundPlan(STEPS, first_step=0, total_steps=STEPS, seed=0))
            steps = [range(step * ROWS, (step + 1) * ROWS) for step in range(STEPS)]
            local_round = LocalRound(steps, 0, STEPS, seed=0, deadline=deadline)
            report, _ = train_round(model, model.parameters, text, 0, local_round, TRAIN)
            model.end()
        for step, loss in enumerate(report.losses, start=1):
            print(f"step {step}: loss {loss:.3f}")
        trained = split.join_adapters([model.parameters, server.end_round({"client": 1.0})])
    tensors = {name: value.detach() for name, value in trained.items()}
    save_adapter(Path(folder), tensors, peft_config, card="# Trained without Flower\n")
    print(f"saved to {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
