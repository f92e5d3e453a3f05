"""Time of local training compared with ``transformers.Trainer``, for equal steps and losses.

    python -m bench.local_training [--pairs 15]

Both sides train the same random Llama with the same LoRA adapter on the same examples per
optimizer step, alternately, in one process with one thread on one core. The length-grouping
sampler of ``Trainer`` selects the examples of a step; each side has its own way to divide them
into micro-batches and to compute the loss. ``Trainer`` is timed from the start to the end of its
step, without loading and padding data; ``train_round`` is timed as a whole. The run fails if the
losses of any step differ by more than 1e-4.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, logging
from transformers.trainer_pt_utils import LengthGroupedSampler

from bench.harness import RATIOS, Side, command, make_table, ratios, show
from bench.job import Job, load_whole, random_job
from bench.shape import SEED, Shape
from finetuning.adapters.adapter import trainable_parameters
from finetuning.data.tokenization import Example
from finetuning.model.whole_model import WholeModel
from finetuning.settings import TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.optimization import OptimizerState

# Mean numbers of input and output tokens: court, consultation, reasoning (FedJudge, table 1).
_KINDS = ((480, 288), (57, 209), (136, 221))
_SPREAD = 0.5  # standard deviation of the logarithm of a length
_LONGEST = 800
_VOCABULARIES = (32000, 8000)
_SAMPLED = 3200  # number of examples: enough for full-size groups in the sampler
_TOLERANCE = 1e-4
_SETTINGS = TrainSettings(optimizer="adamw")


def make_examples(job: Job) -> list[Example]:
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
        answered = min(answered, _LONGEST // 2)
        length = min(wanted + answered, _LONGEST)  # the input is truncated
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


class Alternation(TrainerCallback):  # type: ignore[misc]
    """Time each step of Trainer, and then run and time the same step of Chambers.

    A step of Chambers is a call of ``train_round``; the optimizer's state is kept between steps.
    """

    def __init__(
        self, peft_model: Any, examples: Sequence[Example], steps: Sequence[Sequence[int]]
    ) -> None:
        names = ("Trainer", "Chambers")
        self.trainer, self.chambers = (Side(name, [os.getpid()], warm_up=0) for name in names)
        self._model, self._parameters = WholeModel(peft_model), trainable_parameters(peft_model)
        self._examples, self._steps = examples, steps
        self._state: OptimizerState | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.trainer.start()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Stop the clock, and run the same step with Chambers."""
        self.trainer.stop()
        index = state.global_step - 1
        self.chambers.start()
        report, self._state = train_round(
            model=self._model,
            parameters=self._parameters,
            examples=self._examples,
            padding=0,
            local_round=LocalRound(
                [self._steps[index]], index, len(self._steps), SEED, deadline=math.inf
            ),
            settings=_SETTINGS,
            optimizer_state=self._state,
        )
        self.chambers.stop()
        self.chambers.losses.append(report.losses[0])

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Store the loss; Trainer logs it after the end of its step."""
        if "loss" in logs:
            self.trainer.losses.append(logs["loss"])


def run_trainer(peft_model: Any, rows: list[dict[str, torch.Tensor]], callback: Any) -> None:
    """Train on the rows in order, without log files, checkpoints or evaluation."""

    def pad(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [feature[name] for feature in features], batch_first=True, padding_value=filler
            )
            for name, filler in fillers.items()
        }

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=1,
            per_device_train_batch_size=_SETTINGS.batch_size,
            gradient_accumulation_steps=_SETTINGS.accumulation,
            learning_rate=_SETTINGS.learning_rate,
            weight_decay=_SETTINGS.weight_decay,
            max_grad_norm=_SETTINGS.max_gradient_norm,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            train_sampling_strategy="sequential",  # the rows are in the grouping sampler's order
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = Trainer(
            peft_model, arguments, train_dataset=rows, data_collator=pad, callbacks=[callback]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def as_row(example: Example) -> dict[str, torch.Tensor]:
    """Convert an example to Trainer's format: no loss outside the targets."""
    return {
        "input_ids": example.tokens,
        "attention_mask": torch.ones_like(example.tokens),
        "labels": example.tokens.where(example.is_target, -100),
    }


def compare(job: Job) -> list[str]:
    """Run the pairs of steps, and return a row of the table; exit if losses of a step differ."""
    examples = make_examples(job)
    steps = trainer_steps(examples, _SETTINGS.batch_size * _SETTINGS.accumulation, job.steps)
    callback = Alternation(load_whole(job), examples, steps)
    rows = [as_row(examples[i]) for step in steps for i in step]
    run_trainer(load_whole(job), rows, callback)
    sides = (callback.trainer, callback.chambers)
    tokens = [sum(len(examples[i].tokens) for i in step) for step in steps]
    rates = [f"{sum(tokens) / sum(side.seconds):.0f}" for side in sides]
    for side in sides:  # steps differ in length, so seconds per token are compared
        side.seconds = [s / count for s, count in zip(side.seconds, tokens, strict=True)]
    losses = zip(*(side.losses for side in sides), strict=True)
    difference = max(abs(a - b) for a, b in losses)
    if not difference <= _TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}")
    return [str(job.shape.vocabulary), *rates, *ratios(*sides), f"{difference:.1e}"]


def main() -> None:
    """Compare with a large and a small vocabulary, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="number of measured pairs of steps")
    pairs = parser.parse_args().pairs
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    table = make_table(
        f"{pairs} pairs of steps; ratios are Chambers ÷ Trainer",
        *("vocabulary", "Trainer: tokens/s", "Chambers: tokens/s", *RATIOS),
        "largest difference of a loss",
    )
    for vocabulary in _VOCABULARIES:
        with random_job(Shape(vocabulary=vocabulary, columns=_LONGEST), pairs) as job:
            table.add_row(*compare(job))
    show(table)


if __name__ == "__main__":
    main()
