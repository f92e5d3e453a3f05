"""The sizes at which tables and figures are run: ``sizes.toml``, validated."""

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from finetuning.settings import Section

NAMES = ("small", "medium", "full")
_FILE = Path(__file__).with_name("sizes.toml")


class Models(Section):
    """The base models, by Hugging Face id.

    Attributes:
        english: FL-GLM's tables 1, 2, 4 and 8 and all its figures.
        chat: FL-GLM's table 5.
        chinese: FL-GLM's table 6.
        legal: FedJudge.

    """

    english: str
    chat: str
    chinese: str
    legal: str


class AdapterTraining(Section):
    """An adapter and how fast it learns: settings as in the run config."""

    learning_rate: PositiveFloat
    max_gradient_norm: NonNegativeFloat = 0.0
    prefix_length: PositiveInt = 128
    rank: PositiveInt = 8
    alpha: PositiveInt = 16
    targets: str = ""


class TaskTraining(Section):
    """Training and scoring on a task.

    Attributes:
        steps: Optimizer steps of all clients together.
        rows: Rows of a client's optimizer step.
        micro_batch: Rows of maximal length computed at once; divides ``rows``.
        max_length: Most tokens of a row; longer rows are neither trained on nor scored.
        questions: Held-out questions that are scored at most; 0 for all.
        new_tokens: Longest generated answer, in tokens.

    """

    steps: PositiveInt
    rows: PositiveInt
    micro_batch: PositiveInt
    max_length: PositiveInt
    questions: int = Field(0, ge=0)
    new_tokens: PositiveInt = 128


class TimedTraining(Section):
    """What table 3 of FL-GLM measures.

    Attributes:
        model: Name of the model.
        adapter: Kind of adapter.
        rows: Rows that are trained on, by all clients together.
        max_length: Tokens of a row; longer ones are cut.
        repetitions: Number of measurements.
        client_batch: Numbers of clients of client-batch training.
        hierarchical: Numbers of clients of hierarchical training.

    """

    model: str
    adapter: Literal["lora", "prefix"]
    rows: PositiveInt
    max_length: PositiveInt
    repetitions: PositiveInt
    client_batch: tuple[int, ...]
    hierarchical: tuple[int, ...]


class DecoderAttack(Section):
    """What table 4 of FL-GLM measures; the rest is as in ``bench.attack``.

    Attributes:
        texts: Texts of the colluding client that a decoder is trained on.
        longest: Most tokens of a text that are attacked.
        decoded: Texts that a decoder reads.

    """

    texts: PositiveInt
    longest: PositiveInt
    decoded: PositiveInt


class FLGLM(Section):
    """Settings of FL-GLM's tables and figures.

    Attributes:
        dtype: ``model.dtype``.
        activation_budget: ``split.activation-budget``, which bounds the memory.
        tasks: Tasks of tables 1 and 5.
        summaries: Tasks of table 2; none if it is not run.
        periods: Averaging periods of table 8; the first is that of all other tables and figures.
        period_tasks: Tasks of table 8.
        period_adapter: Adapter of table 8 and the figures.
        clients: Numbers of clients of figures 6 to 8; the first is that of all tables.
        curves: Tasks of figures 6 to 8.
        training: Training and scoring of each task; "default" for those that are not named.
        prefix: P-tuning v2.
        lora: LoRA.
        time: Table 3.
        attack: Table 4.

    """

    dtype: str
    activation_budget: PositiveInt
    tasks: tuple[str, ...]
    summaries: tuple[str, ...]
    periods: tuple[int, ...]
    period_tasks: tuple[str, ...]
    period_adapter: str
    clients: tuple[int, ...]
    curves: tuple[str, ...]
    training: dict[str, TaskTraining]
    prefix: AdapterTraining
    lora: AdapterTraining
    time: TimedTraining
    attack: DecoderAttack


class FedJudge(Section):
    """Settings of FedJudge's tables and figures.

    Attributes:
        dtype: ``model.dtype``.
        rows: Training rows of each client at most; 0 for all that fit.
        rounds: Communication rounds; centralised training has as many. No penalty applies in the
            first.
        local_steps: Optimizer steps of a client in a round; 0 for an epoch. Center, which has the
            rows of three clients, takes three times as many.
        batch_size: ``train.batch-size``.
        accumulation: ``train.accumulation``.
        max_length: ``data.max-length``; longer rows are neither trained on nor measured.
        prompt_length: Most tokens of a question that is answered; longer ones are left out.
        learning_rate: ``train.learning-rate``.
        max_gradient_norm: ``train.max-gradient-norm``.
        rank: ``adapter.rank``.
        alpha: ``adapter.alpha``.
        targets: ``adapter.targets``.
        weight: λ of FedJudge-CL.
        importance_examples: ``continual.importance-examples``.
        questions: Held-out rows of each client that are answered, and at most as many whose loss is
            measured; 0 for all that fit.
        new_tokens: Longest answer, in tokens.
        encoder: BERTScore's encoder, by its Hugging Face id; empty for no BERTScore.
        encoder_layer: The layer that it compares.

    """

    dtype: str
    rows: NonNegativeInt
    rounds: int = Field(ge=2)
    local_steps: NonNegativeInt
    batch_size: PositiveInt
    accumulation: PositiveInt
    max_length: PositiveInt
    prompt_length: PositiveInt
    learning_rate: PositiveFloat
    max_gradient_norm: NonNegativeFloat
    rank: PositiveInt
    alpha: PositiveInt
    targets: str
    weight: NonNegativeFloat
    importance_examples: PositiveInt
    questions: NonNegativeInt
    new_tokens: PositiveInt
    encoder: str = ""
    encoder_layer: PositiveInt | None = None


class Size(Section):
    """One size.

    Attributes:
        seeds: Number of seeds of each cell that depends on one.
        models: The base models.
        fl_glm: FL-GLM's tables and figures.
        fedjudge: FedJudge's tables and figures.

    """

    seeds: PositiveInt
    models: Models
    fl_glm: FLGLM
    fedjudge: FedJudge


def read_size(name: str) -> Size:
    """Read a size by its name."""
    return Size.model_validate(tomllib.loads(_FILE.read_text(encoding="utf-8"))[name])
