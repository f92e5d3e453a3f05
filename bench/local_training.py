"""Local training against ``transformers.Trainer``: the same steps, the same losses, the time.

    python -m bench.local_training [--vocabulary 32000] [--pairs 15]

Both sides train the same random Llama with the same LoRA adapter on the same examples per
optimizer step, one step in turn, in one process with one thread on one core. Which examples form a
step is decided by the length-grouping sampler of ``Trainer``; into which micro-batches they are put
is each side's own affair, and so is where the loss is computed. ``Trainer`` is timed from the
beginning to the end of its step, without loading and padding its data; ``train_round`` is timed as
a whole. The run fails if the losses of any step differ by more than 1e-4.
"""

import argparse
import copy
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from finetuning.adapters.adapter import trainable_parameters
from finetuning.data.tokenization import Example
from finetuning.model.whole_model import WholeModel
from finetuning.settings import TrainSettings
from finetuning.training.loop import RoundPlan, train_round
from finetuning.training.optimization import OptimizerState

# FedJudge's table 1: the mean tokens of input and output of court, consultation and reasoning.
_KINDS = ((480, 288), (57, 209), (136, 221))
_SPREAD = 0.5  # standard deviation of the logarithm
_LONGEST = 800
_SAMPLED = 3200  # examples the sampler sorts; with so many its groups have their full size
_TOLERANCE = 1e-4
_SEED = 0


@dataclass
class Side:
    """What was measured of one side, a value per step: seconds, CPU seconds and loss."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def measured(self, started: tuple[float, float]) -> None:
        """Append the time since ``now()`` gave ``started``."""
        seconds, cpu = now()
        self.seconds.append(seconds - started[0])
        self.cpu.append(cpu - started[1])


def now() -> tuple[float, float]:
    """Give wall-clock and CPU time in seconds."""
    return time.perf_counter(), time.process_time()


def make_examples(count: int, vocabulary: int) -> list[Example]:
    """Draw random token ids in lengths around the means of FedJudge's three kinds of text."""
    random = np.random.default_rng(_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    examples = []
    for index in range(count):
        # A lognormal's mean is exp(mu + spread²/2).
        wanted, answered = (
            max(8, round(random.lognormal(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))
            for mean in _KINDS[index % len(_KINDS)]
        )
        answered = min(answered, _LONGEST // 2)
        length = min(wanted + answered, _LONGEST)  # the input loses its end
        tokens = torch.randint(vocabulary, (length,), generator=generator)
        is_target = torch.arange(length) >= length - answered
        examples.append(Example(tokens, is_target, length - answered, ""))
    return examples


def trainer_steps(examples: Sequence[Example], size: int, count: int) -> list[list[int]]:
    """Give ``count`` steps spread evenly over an epoch in the order of Trainer's sampler.

    Neighbouring steps are of like length, so the first ones alone would all be long.
    """
    generator = torch.Generator().manual_seed(_SEED)
    sampler = LengthGroupedSampler(
        size, lengths=[len(example.tokens) for example in examples], generator=generator
    )
    order = list(sampler)
    steps = [order[first : first + size] for first in range(0, len(order), size)]
    return [steps[int((index + 0.5) * len(steps) / count)] for index in range(count)]


def make_model(vocabulary: int) -> Any:
    """Make a random Llama with the paper's LoRA adapter, without dropout."""
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=_LONGEST,
            use_cache=False,
        )
    )
    targets = ["q_proj", "k_proj", "v_proj"]
    config = LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.0, target_modules=targets, task_type=TaskType.CAUSAL_LM
    )
    return get_peft_model(model, config)


class Ours:
    """Runs one step of ``train_round`` at a time, keeping the optimizer's state between them."""

    def __init__(
        self, peft_model: Any, examples: Sequence[Example], settings: TrainSettings, steps: int
    ) -> None:
        self.side = Side()
        self._model = WholeModel(peft_model)
        self._parameters = trainable_parameters(peft_model)
        self._examples, self._settings, self._steps = examples, settings, steps
        self._state: OptimizerState | None = None

    def step(self, index: int, chosen: Sequence[int]) -> None:
        """Train on the chosen examples."""
        place = RoundPlan([chosen], index, self._steps, _SEED, math.inf)
        started = now()
        report, self._state = train_round(
            self._model,
            self._parameters,
            self._examples,
            0,
            place,
            self._settings,
            optimizer_state=self._state,
        )
        self.side.measured(started)
        self.side.losses += report.losses


class Alternation(TrainerCallback):  # type: ignore[misc]
    """Times each step of Trainer, and runs and times the same step of ours after it."""

    def __init__(self, ours: Ours, steps: Sequence[Sequence[int]]) -> None:
        self.side = Side()
        self._ours, self._steps = ours, steps
        self._started = now()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._started = now()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Stop the clock, and let ours take the same step."""
        self.side.measured(self._started)
        index = state.global_step - 1
        self._ours.step(index, self._steps[index])

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep the loss; Trainer logs after its step has ended."""
        if "loss" in logs:
            self.side.losses.append(logs["loss"])


def run_trainer(
    peft_model: Any, rows: list[dict[str, torch.Tensor]], settings: TrainSettings, callback: Any
) -> None:
    """Train on the rows in their order, with nothing in a step that isn't training."""

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
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.accumulation,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_gradient_norm,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            train_sampling_strategy="sequential",  # the rows are in its grouping sampler's order
            use_cpu=True,
            bf16=False,
            dataloader_num_workers=0,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=_SEED,
        )
        trainer = Trainer(
            peft_model, arguments, train_dataset=rows, data_collator=pad, callbacks=[callback]
        )
        for kind in (type(c) for c in list(trainer.callback_handler.callbacks)):
            if kind.__name__ == "PrinterCallback":
                trainer.remove_callback(kind)
        trainer.train()


def as_row(example: Example) -> dict[str, torch.Tensor]:
    """Give what Trainer gets of an example: no loss outside the targets."""
    return {
        "input_ids": example.tokens,
        "attention_mask": torch.ones_like(example.tokens),
        "labels": example.tokens.where(example.is_target, -100),
    }


def print_table(vocabulary: int, tokens: Sequence[int], trainer: Side, ours: Side) -> None:
    """Print both sides' throughput, and how many times faster ours is."""
    rate = {name: sum(tokens) / sum(side.seconds) for name, side in (("t", trainer), ("o", ours))}
    # Steps differ in length, so it is seconds per token that are ranked.
    per_token = [
        [seconds / count for seconds, count in zip(side.seconds, tokens, strict=True)]
        for side in (trainer, ours)
    ]
    pairs = [theirs / mine for theirs, mine in zip(*per_token, strict=True)]
    print(
        f"vocabulary {vocabulary}, {len(tokens)} pairs of steps, {sum(tokens)} tokens each side\n"
        f"  tokens per second: Trainer {rate['t']:.0f}, ours {rate['o']:.0f}\n"
        f"  speed, ours ÷ Trainer: medians {median(per_token[0]) / median(per_token[1]):.3f}, "
        f"minima {min(per_token[0]) / min(per_token[1]):.3f}, "
        f"CPU seconds {sum(trainer.cpu) / sum(ours.cpu):.3f}, "
        f"median of pairs {median(pairs):.3f}"
    )


def compare(vocabulary: int, pairs: int) -> None:
    """Run the pairs for one vocabulary and print the result.

    Raises:
        SystemExit: the losses of a step differ.
    """
    settings = TrainSettings(optimizer="adamw")
    size = settings.batch_size * settings.accumulation
    examples = make_examples(_SAMPLED, vocabulary)
    steps = trainer_steps(examples, size, pairs)
    theirs = make_model(vocabulary)
    ours = Ours(copy.deepcopy(theirs), examples, settings, len(steps))
    callback = Alternation(ours, steps)
    run_trainer(theirs, [as_row(examples[i]) for step in steps for i in step], settings, callback)
    tokens = [sum(len(examples[i].tokens) for i in step) for step in steps]
    print_table(vocabulary, tokens, callback.side, ours.side)
    difference = max(
        abs(a - b) for a, b in zip(callback.side.losses, ours.side.losses, strict=True)
    )
    print(f"  largest difference of a step's loss: {difference:.1e}")
    if not difference <= _TOLERANCE:
        raise SystemExit(f"the losses differ by more than {_TOLERANCE}")


def main() -> None:
    """Compare at the given vocabularies."""
    parser = argparse.ArgumentParser(description="Local training against transformers.Trainer.")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 8000])
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for vocabulary in arguments.vocabulary:
        compare(vocabulary, arguments.pairs)


if __name__ == "__main__":
    main()
