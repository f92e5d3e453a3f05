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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, logging
from transformers.trainer_pt_utils import LengthGroupedSampler

from bench.harness import RATIOS, WARM_UP, Side, command, make_table, ratios, show, use_one_core
from bench.job import Job, load_whole, random_job
from bench.shape import SEED, Shape
from finetuning.adapters.adapter import trainable_parameters
from finetuning.data.tokenization import Example
from finetuning.model.whole_model import WholeModel
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.optimization import OptimizerState

# Mean numbers of input and output tokens: court, consultation, reasoning (FedJudge, table 1).
_KINDS = ((480, 288), (57, 209), (136, 221))
_SPREAD = 0.5  # standard deviation of the logarithm of a length
LONGEST = 800
_VOCABULARIES = (32000, 8000)
_SAMPLED = 3200  # number of examples: enough for full-size groups in the sampler
_TOLERANCE = 1e-4


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
    """Time each step of a trainer, store its loss, and call ``after`` with the step's index."""

    def __init__(self, side: Side, after: Callable[[int], None] = lambda index: None) -> None:
        self._side, self._after = side, after

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._side.start()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Stop the clock."""
        self._side.stop()
        self._after(state.global_step - 1)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Store the loss; a trainer logs it after the end of its step."""
        if "loss" in logs:
            self._side.losses.append(logs["loss"])


def chambers_step(
    job: Job, side: Side, examples: Sequence[Example], steps: Sequence[Sequence[int]]
) -> Callable[[int], None]:
    """Load the model, and return a function that runs and times a step of Chambers.

    A step is a call of ``train_round``; the optimizer's state is passed from step to step.
    """
    peft_model = load_whole(job)
    model, parameters = WholeModel(peft_model), trainable_parameters(peft_model)
    settings = job.settings.model_copy(update={"optimizer": "adamw"})
    state: OptimizerState | None = None

    def run(index: int) -> None:
        nonlocal state
        side.start()
        report, state = train_round(
            model=model,
            parameters=parameters,
            examples=examples,
            padding=0,
            local_round=LocalRound([steps[index]], index, len(steps), SEED, deadline=math.inf),
            settings=settings,
            optimizer_state=state,
        )
        side.stop()
        side.losses.append(report.losses[0])

    return run


def arguments_of(job: Job, directory: str) -> dict[str, Any]:
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
        "gradient_checkpointing": job.model.gradient_checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }


def run_trainer(job: Job, rows: list[dict[str, torch.Tensor]], callback: Timing) -> None:
    """Train on the rows in order with ``transformers.Trainer``."""

    def pad(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [feature[name] for feature in features], batch_first=True, padding_value=filler
            )
            for name, filler in fillers.items()
        }

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(num_train_epochs=1, **arguments_of(job, directory))
        trainer = Trainer(
            load_whole(job), arguments, train_dataset=rows, data_collator=pad, callbacks=[callback]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def run_packed(job: Job, rows: list[dict[str, torch.Tensor]]) -> tuple[Side, list[int]]:
    """Train on the rows with TRL's SFTTrainer and packing; return times and tokens of steps."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    side = Side("SFTTrainer, packed", [os.getpid()])
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    columns = {name: [row[name].tolist() for row in rows] for name in ("input_ids", "labels")}
    with tempfile.TemporaryDirectory() as directory:
        arguments = SFTConfig(
            packing=True, max_length=LONGEST, max_steps=job.steps, **arguments_of(job, directory)
        )
        trainer = SFTTrainer(
            load_whole(job),
            arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, eos_token="<end>", pad_token="<end>"
            ),
            callbacks=[Timing(side)],
        )
        trainer.remove_callback(PrinterCallback)
        packed = [len(tokens) for tokens in trainer.train_dataset["input_ids"]]
        trainer.train()
    size = job.shape.rows * job.shape.micro_batches
    return side, [sum(packed[n * size : (n + 1) * size]) for n in range(job.steps)]


def as_row(example: Example) -> dict[str, torch.Tensor]:
    """Convert an example to Trainer's format: no loss outside the targets."""
    return {
        "input_ids": example.tokens,
        "attention_mask": torch.ones_like(example.tokens),
        "labels": example.tokens.where(example.is_target, -100),
    }


def rate(side: Side, tokens: Sequence[int]) -> str:
    """Return a side's tokens per second, without padding and without the warm-up."""
    return f"{sum(tokens[WARM_UP:]) / sum(side.seconds[WARM_UP:]):.0f}"


def gigabytes(side: Side) -> str:
    """Return the most GPU memory that a turn added to what was allocated before it, in GB."""
    return f"{max(side.gpu_bytes[WARM_UP:]) / 1e9:.2f}"


def compare(job: Job, tolerance: float = _TOLERANCE) -> list[list[str]]:
    """Run the pairs of steps, and return rows of the table; exit if losses of a step differ."""
    examples = make_examples(job)
    steps = trainer_steps(examples, job.shape.rows * job.shape.micro_batches, job.steps - WARM_UP)
    steps = (WARM_UP * steps)[:WARM_UP] + steps
    trainer, chambers = sides = [Side(name, [os.getpid()]) for name in ("Trainer", "Chambers")]
    rows = [as_row(examples[i]) for step in steps for i in step]
    run_trainer(job, rows, Timing(trainer, chambers_step(job, chambers, examples, steps)))
    tokens = [sum(len(examples[i].tokens) for i in step) for step in steps]
    result = [[side.name, rate(side, tokens), gigabytes(side)] for side in sides]
    for side in sides:  # steps differ in length, so seconds per token are compared
        side.seconds = [s / count for s, count in zip(side.seconds, tokens, strict=True)]
    difference = max(abs(a - b) for a, b in zip(trainer.losses, chambers.losses, strict=True))
    if not difference <= tolerance:
        raise SystemExit(f"the losses differ by {difference:.1e}")
    result[1] += [*ratios(trainer, chambers), f"{difference:.1e}"]
    if job.client_device != "cpu" and find_spec("trl"):
        packed, packed_tokens = run_packed(job, [as_row(example) for example in examples])
        result.append([packed.name, rate(packed, packed_tokens), gigabytes(packed)])
    return result


def table_of(title: str) -> Table:
    """Return an empty table; each row is a configuration's name and a row of `compare`."""
    names = ("", " ", "tokens/s", "GB added in a step", *RATIOS, "largest difference of a loss")
    return make_table(title, *names)


def main() -> None:
    """Compare with a large and a small vocabulary, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="number of measured pairs of steps")
    pairs = parser.parse_args().pairs
    use_one_core()
    logging.set_verbosity_error()
    table = table_of(f"{pairs} pairs of steps; ratios are Chambers ÷ Trainer")
    for vocabulary in _VOCABULARIES:
        shape = Shape(vocabulary=vocabulary, columns=LONGEST, micro_batches=8)
        with random_job(shape, WARM_UP + pairs) as job:
            for row in compare(job):
                table.add_row(f"vocabulary {vocabulary}", *row)
    show(table)


if __name__ == "__main__":
    main()
