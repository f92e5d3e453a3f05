"""Time of local training compared with ``transformers.Trainer``, for equal steps and losses.

    python -m bench.local_training [--pairs 15]

Both sides train the same model on the same examples per optimizer step, alternately, in one process
with one thread. The length-grouping sampler of ``Trainer`` selects the examples of a step.
``Trainer`` is timed without loading and padding data; ``train_round`` is timed as a whole. The run
fails if the losses of any step differ by more than 1e-4.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from bench.harness import RATIOS, WARM_UP, Side, command, make_table, ratios, show, use_one_core
from bench.job import SEED, Shape, TrainingJob, load_whole, random_job, whole_course
from finetuning.data.tokenization import Example

# Mean numbers of input and output tokens: court, consultation, reasoning (FedJudge, table 1).
_KINDS = ((480, 288), (57, 209), (136, 221))
_SPREAD = 0.5  # standard deviation of the logarithm of a length
LONGEST = 800
_VOCABULARIES = (32000, 8000)
_SAMPLED = 3200  # number of examples: enough for full-size groups in the sampler
_TOLERANCE = 1e-4
# Each row of the table is a configuration's name and a row of `compare`.
HEADINGS = ("", " ", "tokens/s", "GB added in a step", *RATIOS, "largest difference of a loss")


def make_examples(job: TrainingJob) -> list[Example]:
    """Draw random token ids, with lengths around the means of FedJudge's three kinds of text."""
    random = np.random.default_rng(SEED)
    generator = torch.Generator().manual_seed(SEED)
    examples: list[Example] = []
    for index in range(_SAMPLED):
        # A lognormal's mean is exp(mu + spread²/2).
        wanted, answered = (
            max(8, round(random.lognormal(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))
            for mean in _KINDS[index % len(_KINDS)]
        )
        answered = min(answered, LONGEST // 2)
        length = min(wanted + answered, LONGEST)  # the input is truncated
        tokens = torch.randint(job.shape.vocabulary, (length,), generator=generator)
        prompt = length - answered
        is_target = torch.arange(length) >= prompt
        examples.append(Example(tokens, is_target, prompt, reference="", row=index))
    return examples


def trainer_steps(examples: Sequence[Example], size: int, count: int) -> list[list[int]]:
    """Return ``count`` steps spread evenly over an epoch in the order of Trainer's sampler.

    Adjacent steps have similar lengths, so the first steps alone would all be long.
    """
    generator = torch.Generator().manual_seed(SEED)
    lengths = [len(example.tokens) for example in examples]
    order = list(LengthGroupedSampler(size, lengths=lengths, generator=generator))
    steps = [order[first : first + size] for first in range(0, len(order), size)]
    return [steps[int((index + 0.5) * len(steps) / count)] for index in range(count)]


class Timing(TrainerCallback):  # type: ignore[misc]
    """Time each step of a trainer, and then call ``after``."""

    def __init__(self, side: Side, after: Callable[[], None]) -> None:
        self._side, self._after = side, after

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._side.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self._side.stop()
        self._after()


def arguments_of(job: TrainingJob, directory: str) -> dict[str, Any]:
    """Return a trainer's arguments: the job's settings, without checkpoints or evaluation."""
    settings, on_gpu = job.settings, job.client_device != "cpu"
    return {
        "output_dir": directory,
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulation,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_gradient_norm,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",  # the rows are in the grouping sampler's order
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }


def end_tokenizer() -> Any:
    """Return a tokenizer whose only token, 0, is the padding and the end of a text."""
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def as_row(example: Example) -> dict[str, list[int]]:
    """Convert an example to Trainer's format: no loss outside the targets."""
    labels = example.tokens.where(example.is_target, -100)
    return {"input_ids": example.tokens.tolist(), "labels": labels.tolist()}


def row_of(side: Side, tokens: Sequence[int]) -> list[str]:
    """Return a row of the table; ``tokens`` are those of each turn, without padding.

    The memory is the most that a turn added to what was allocated before it.
    """
    rate = sum(tokens[WARM_UP:]) / sum(side.seconds[WARM_UP:])
    return [side.name, f"{rate:.0f}", f"{max(side.gpu_bytes[WARM_UP:]) / 1e9:.2f}"]


def compare(job: TrainingJob, tolerance: float = _TOLERANCE) -> list[list[str]]:
    """Run the pairs of steps, and return rows of the table; exit if losses of a step differ."""
    examples = make_examples(job)
    steps = trainer_steps(examples, job.shape.rows * job.shape.micro_batches, job.steps - WARM_UP)
    steps = (WARM_UP * steps)[:WARM_UP] + steps
    trainer, chambers = sides = [Side(name, [os.getpid()]) for name in ("Trainer", "Chambers")]
    course = whole_course(replace(job, examples=make_examples), steps)

    def step() -> None:
        chambers.start()
        chambers.losses += course.train(1)
        chambers.stop()

    with tempfile.TemporaryDirectory() as directory:
        finished = Trainer(
            load_whole(job),
            TrainingArguments(**arguments_of(job, directory), num_train_epochs=1),
            callbacks=[Timing(trainer, after=step)],
            train_dataset=[as_row(examples[i]) for step in steps for i in step],
            data_collator=DataCollatorForSeq2Seq(end_tokenizer()),
        )
        finished.remove_callback(PrinterCallback)
        finished.train()
    losses = [entry["loss"] for entry in finished.state.log_history if "loss" in entry]
    tokens = [sum(len(examples[i].tokens) for i in step) for step in steps]
    result = [row_of(side, tokens) for side in sides]
    for side in sides:  # steps differ in length, so seconds per token are compared
        side.seconds = [s / count for s, count in zip(side.seconds, tokens, strict=True)]
    difference = max(abs(a - b) for a, b in zip(losses, chambers.losses, strict=True))
    if not difference <= tolerance:
        raise SystemExit(f"the losses differ by {difference:.1e}")
    result[1] += [*ratios(trainer, chambers), f"{difference:.1e}"]
    return result


def main() -> None:
    """Compare with a large and a small vocabulary, and print the table."""
    pairs = command(__doc__, pairs=15).parse_args().pairs
    use_one_core()
    logging.set_verbosity_error()
    table = make_table(*HEADINGS)
    for vocabulary in _VOCABULARIES:
        shape = Shape(vocabulary=vocabulary, columns=LONGEST, micro_batches=8)
        with random_job(shape, WARM_UP + pairs) as job:
            for row in compare(job):
                table.add_row(f"vocabulary {vocabulary}", *row)
    show(f"{pairs} pairs of steps; ratios are Chambers ÷ Trainer", table)


if __name__ == "__main__":
    main()
