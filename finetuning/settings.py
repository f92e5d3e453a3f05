"""Settings of fine-tuning, as one validated Pydantic model per section.

The run configuration, its error messages and the table in ``docs/configuration.md`` are generated
from these models and those in ``split/settings.py``.
"""

import re
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from finetuning.columns import COLUMNS


def kebab_case(name: str) -> str:
    """Return the run-config spelling of a field name: ``batch_size`` becomes ``batch-size``."""
    return name.replace("_", "-")


def names_modules(targets: str) -> bool:
    """Return whether ``adapter.targets`` is a list of names, not a rule by which to find them."""
    return bool(re.fullmatch(r"[\w.,\s]*\w[\w.,\s]*", targets))


class Section(BaseModel):
    """A group of settings: immutable, so that it can be a cache key; unknown keys are rejected."""

    model_config = ConfigDict(
        alias_generator=kebab_case,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )


class ModelSettings(Section):
    """The base model and its representation in memory."""

    name: str = Field(
        "tiny",
        min_length=1,
        description="A Hugging Face id; the absolute path of a folder or GGUF file; `tiny`, which "
        "is built and pre-trained on first use; or [`smollm2`](models.md#a-small-model-smollm2).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of the frozen weights; `auto` is bfloat16 on a GPU that supports it "
        "natively, else float32. Adapters are always float32.",
    )
    quantization: Literal["none", "nf4", "int8"] = Field(
        "none", description="Quantisation of the frozen weights by bitsandbytes."
    )
    devices: Literal["first", "all"] = Field(
        "first",
        description="Whether a client's model is on the first accelerator, or on all in "
        "proportion to their free memory. For `fl-glm`, see `split.body-devices`.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: slower, but needs less memory.",
    )


class AdapterSettings(Section):
    """The adapter: LoRA (FedJudge section 4.2.3) or prefixes (FL-GLM section 4.1.4)."""

    kind: Literal["lora", "prefix"] = Field(
        "lora",
        description="LoRA, or `prefix` (P-tuning v2): trained keys and values before those of the "
        "tokens in every block.",
    )
    prefix_length: PositiveInt = Field(
        128,
        description="Positions of a `prefix`, each of which takes as much memory as a token.",
    )
    prefix_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout of a `prefix`; FL-GLM's published code uses 0.1."
    )
    initial_text: str = Field(
        "",
        description="Text whose keys and values, repeated up to the prefix length, initialise a "
        "`prefix`. The server must be able to load the whole model. Empty: random numbers.",
    )
    rank: PositiveInt = Field(4, description="Rank r of the LoRA matrices.")
    alpha: PositiveFloat = Field(
        16.0, description="LoRA scale: updates are multiplied by alpha / r."
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout before the LoRA matrices.")
    targets: str = Field(
        "",
        description="Names of the adapted modules, separated by commas; `all-linear`: the "
        "blocks' linear layers, except experts, routers and gates; or a regular expression for "
        "modules' paths, such as `.*\\.[0-7]\\..*\\.[qv]_proj` for eight blocks. Empty: PEFT's "
        "default for the architecture, else `all-linear`.",
    )

    ranks: str = Field(
        "",
        pattern=r"^(|site|[1-9]\d*(, ?[1-9]\d*)*)$",
        description="[Ranks of single clients](training.md#ranks-for-unequal-machines), up to "
        "`adapter.rank`: numbers separated by commas, which simulated clients have in turn; or "
        "`site`, the `rank` of each site file. Empty: all have `adapter.rank`. Not with J, masked "
        "sums, or optimizers that keep their states.",
    )
    trained: Literal["both", "b", "alternating"] = Field(
        "both",
        description="Which LoRA matrices clients train and send: both; only B, while A stays at "
        "its random start (FFA-LoRA); or B in odd and A in even rounds (RoLoRA). With one, the "
        "average of the adapters is that of the models ([exactly](training.md#exact-averages)), "
        "and clients send half as much. Not for `fl-glm`.",
    )

    @model_validator(mode="after")
    def _has_factors(self) -> Self:
        if self.kind == "prefix" and self.trained != "both":
            raise ValueError(f'adapter.trained = "{self.trained}" is for adapter.kind = "lora"')
        if self.ranks and (self.kind == "prefix" or self.trained != "both"):
            raise ValueError('adapter.ranks is for adapter.kind = "lora" with trained = "both"')
        if too_large := [rank for rank in self.numbered_ranks if rank > self.rank]:
            raise ValueError(f"adapter.ranks contains {too_large[0]}; adapter.rank is {self.rank}")
        return self

    @property
    def numbered_ranks(self) -> list[int]:
        """The ranks of simulated clients, in turn; empty if all have the same or sites decide."""
        return [] if self.ranks in {"", "site"} else [int(n) for n in self.ranks.split(",")]

    def with_rank(self, rank: int) -> "AdapterSettings":
        """Return the settings of a client of this rank, whose products have the same scale."""
        alpha = self.alpha * rank / self.rank
        return self.model_copy(update={"rank": rank, "alpha": alpha})

    def trained_names(self, names: Iterable[str], round_number: int) -> list[str]:
        """Return those of an adapter's names, in PEFT's saved format, that a round trains."""
        is_b = self.trained == "b" or round_number % 2 == 1
        mark = {"both": ""}.get(self.trained, ".lora_B." if is_b else ".lora_A.")
        return [name for name in names if mark in name]

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before a row's tokens; each uses as much memory as a token."""
        return self.prefix_length if self.kind == "prefix" else 0


class DataSettings(Section):
    """The source of private text and its conversion to examples."""

    path: str = Field(
        "",
        description="For simulations: absolute path of a folder with a folder per client, or of "
        "one data set to divide; or its Hugging Face id ([formats](training.md#data)). Empty: "
        "generated data. In deployments, [site files](policy.md) name the data.",
    )
    generated: Literal["styles", "matters", "matters-unequal", "matters-even", "persons"] = Field(
        "styles",
        description="Data used without `data.path`. `styles`: each client has court views, "
        "consultations or reasoning. `matters`: questions on twelve legal topics, divided at "
        "random among the clients, who are tested on all; `matters-unequal`: with data sizes of "
        "3 : 2 : 1; `matters-even`: all topics at each client; `persons`: also invented people's "
        "case files, for [attacks](results.md#what-can-another-institution-read).",
    )
    rows: int = Field(
        0,
        ge=0,
        description="Maximum number of a client's training rows, of which the first are used; with "
        "generated data, the number of rows on matters or in a style. 0: all rows or, with "
        "generated data, its default. Only for simulations.",
    )
    pool: str = Field(
        "",
        description="For centralised training in simulation: names of clients, separated by "
        "commas, or `*` for all, whose rows a single client, `center`, has.",
    )
    task: Literal[
        "",
        "boolq",
        "cb",
        "copa",
        "multirc",
        "record",
        "rte",
        "wic",
        "wsc",
        "cnn-dailymail",
        "xsum",
        "huatuo",
        "court",
        "consultation",
        "reasoning",
    ] = Field(
        "",
        description="[Task](tasks.md) whose published format the files have. Empty: instructions "
        "or conversations.",
    )
    partition: Literal["iid", "label", "length", "dirichlet"] = Field(
        "iid",
        description="How one data set is divided among simulated clients: evenly at random, by "
        "label, by text length, or with label shares from a Dirichlet distribution.",
    )
    partition_field: str = Field(
        "", description="Column with the label for `label` and `dirichlet` partitions."
    )
    dirichlet_alpha: PositiveFloat = Field(
        0.5,
        description="Concentration of the Dirichlet distribution; smaller values skew the "
        "shares more.",
    )
    test_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of a client's rows to hold out if it has no test file. Questions on "
        "the same passage stay together.",
    )
    columns: str = Field(
        "",
        description="Names of the files' columns, if they aren't [the usual "
        'ones](training.md#data): pairs such as `"prompt=frage,completion=antwort"`. Other columns '
        "are then not used.",
    )
    max_length: int = Field(
        800,
        ge=16,
        description="Maximum tokens per example; longer examples lose the end of their inputs "
        "first. A table of position embeddings, as in GPT-2, also limits it.",
    )
    skip_bad_rows: bool = Field(
        False, description="Leave out malformed rows, with a warning, instead of refusing to start."
    )

    @property
    def names_of_columns(self) -> dict[str, str]:
        """The names in `COLUMNS` of ``columns``, by the file's columns; empty without them."""
        pairs = [pair.partition("=") for pair in self.columns.split(",") if pair.strip()]
        return {own.strip(): known.strip() for known, _, own in pairs}

    @model_validator(mode="after")
    def _has_one_size(self) -> "DataSettings":
        if self.rows and self.generated == "matters-unequal":
            raise ValueError('data.rows: data.generated = "matters-unequal" has sizes of its own')
        return self

    @model_validator(mode="after")
    def _names_columns(self) -> "DataSettings":
        names, pairs = self.names_of_columns, self.columns.strip(" ,").split(",")
        known = set(names.values())
        if self.columns and (not known <= {*COLUMNS} or "" in names or len(known) < len(pairs)):
            raise ValueError(
                f'data.columns = "{self.columns}" must have different names of columns, such as '
                f'"prompt=frage,completion=antwort", each for one of {", ".join(COLUMNS)}'
            )
        return self

    @property
    def pooled_names(self) -> list[str]:
        """The names in ``pool``, in order."""
        return [name.strip() for name in self.pool.split(",") if name.strip()]


class TrainSettings(Section):
    """Local training (FedJudge section 4.2.3)."""

    epochs: PositiveInt = Field(1, description="Passes over a client's data per round.")
    local_steps: int = Field(
        0, ge=0, description="Optimizer steps per round; 0: as many as `epochs` takes."
    )
    checkpoint_minutes: NonNegativeFloat = Field(
        10.0,
        description="Minutes between checkpoints within a client's round, from which a resumed "
        "run continues. 0: none. Not for `fl-glm`.",
    )
    batch_size: PositiveInt = Field(
        2,
        description="Size of a micro-batch, in examples of maximum length. Shorter examples are "
        "combined up to the same number of padded tokens, prefixes included, which affects only "
        "speed.",
    )
    accumulation: PositiveInt = Field(
        8,
        description="An optimizer step has `batch-size` × `accumulation` examples.",
    )
    optimizer: Literal["adam", "adamw"] = Field("adam", description="Optimizer of the adapters.")
    optimizer_state: Literal["reset", "keep"] = Field(
        "reset",
        description="Whether a client starts each round with a new optimizer or keeps its state.",
    )
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Weight decay of the optimizer.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule over the whole run."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of the run's steps in which the learning rate rises."
    )
    max_gradient_norm: NonNegativeFloat = Field(
        0.3, description="Maximum gradient norm; larger gradients are scaled down. 0: no maximum."
    )


class ContinualSettings(Section):
    """The continual-learning penalty of FedJudge-CL (Eq. 3 and 4)."""

    weight: NonNegativeFloat = Field(
        1.0,
        alias="lambda",
        description="λ of Eq. 4. With 0, the run equals FedJudge-Base, but still reports "
        "distances.",
    )
    importance: Literal["server", "client"] = Field(
        "server",
        description="Whose importance J a client uses: the mean over the clients that evaluate, "
        "or its own.",
    )
    importance_examples: PositiveInt = Field(
        64, description="Maximum number of examples from which J is computed."
    )
    share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Target share of the penalty in the gradient norm, such as 0.1, for which λ "
        "is adapted in each step. 0: λ is `continual.lambda`, whose best value depends on model "
        "and data.",
    )
    sum: Literal["all", "tensor"] = Field(
        "all",
        description="`all`: one sum s (Eq. 3) over all weights. `tensor`: one s per tensor, and "
        "half the sum of their penalties, as in the published code.",
    )
    shuffle: bool = Field(
        False,
        description="Shuffle J within each tensor, as a control experiment.",
    )


class FedProxSettings(Section):
    """The proximal term of FedProx (Li et al., 2020)."""

    mu: NonNegativeFloat = Field(
        0.0,
        description="μ of the term μ/2 · ‖W − Ŵ‖² in the loss (W: the adapter; Ŵ: the global "
        "adapter that the client received). Required with `fedprox`, whose authors tried 0.001 to "
        "1.",
    )


class EvaluateSettings(Section):
    """Evaluation on held-out data."""

    every: PositiveInt = Field(
        1, description="Rounds between evaluations; the last round is always evaluated."
    )
    batch_size: PositiveInt = Field(8, description="Examples evaluated at once.")
    alone: bool = Field(
        False,
        description="For comparison, also train a model on each client's rows alone, for as many "
        "steps. Training takes twice as long; the model is never sent. Not for `fl-glm`.",
    )
    generate: bool = Field(
        False,
        description="Also generate answers, and score them with ROUGE and BLEU.",
    )
    generate_examples: PositiveInt = Field(
        32, description="Maximum number of held-out rows to generate answers for."
    )
    show_answers: int = Field(
        0,
        ge=0,
        description="Held-out questions per client that are sent to the coordinator and shown in "
        "the report, with reference and generated answers. Needs `evaluate.generate` and, in "
        "deployments, each site's permission.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Maximum tokens per generated answer.")

    @property
    def shown(self) -> int:
        """Number of answers per model that a client sends as text."""
        return min(self.show_answers, self.generate_examples) if self.generate else 0
