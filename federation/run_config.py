"""The run configuration: validation of all settings in ``[tool.flwr.app.config]``."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from federation.methods import METHODS, Method, StrategyName
from federation.server_settings import ServerSettings
from federation.setting_errors import explain_problem, explain_unknown, require_absolute
from federation.sum_settings import MIN_GROUP, SumSettings
from finetuning.errors import UserError
from finetuning.settings import (
    AdapterSettings,
    ContinualSettings,
    DataSettings,
    EvaluateSettings,
    FedProxSettings,
    ModelSettings,
    Section,
    TrainSettings,
)
from split.address import is_unspecified
from split.settings import SplitSettings

Scalar = str | int | float | bool

# Value of ``instruction-key`` that disables the signing of instructions in a deployment.
UNSIGNED = "none"

# Seconds added to a client's time limit, for starting a process, importing PyTorch, and transfers.
_GRACE_SECONDS = 60.0


class ConfigError(UserError, ValueError):
    """The run configuration is invalid; the message lists all unknown keys and invalid values."""


class RunConfig(Section):
    """All settings of a run; most are grouped in sections, such as ``train``."""

    strategy: StrategyName = Field(
        "fedjudge-base",
        description="; ".join(f"`{name}`: {method.description}" for name, method in METHODS.items())
        + ".",
    )
    rounds: int = Field(
        5,
        ge=0,
        description="Rounds; with 0, models are only evaluated.",
    )
    seed: int = Field(
        0,
        ge=0,
        description="Seed of all random numbers, except keys, tickets, and a policy's draws and "
        "noise.",
    )
    min_nodes: PositiveInt = Field(
        2,
        description="Minimum number of connected SuperNodes to start a round, and of valid "
        "replies to continue the run. `chambers train` by default sets it to the number of "
        "clients per round.",
    )
    sample: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Random share of the connected clients, but at least `min-nodes`, that "
        "trains in a round. One fixed sample of this size evaluates, and saves the final "
        "adapters.",
    )
    exclude: str = Field(
        "",
        description="Names of clients that take no part, separated by commas, as after `chambers "
        "withdraw`.",
    )
    max_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Maximum share of a client in averages, which are weighted by data size, "
        "within [agreed sizes](security.md#caps-on-averages). Larger shares are reduced, and "
        "logged.",
    )
    max_distance: float = Field(
        0.0,
        ge=0,
        description="Maximum distance of a client's adapter from the round's initial one, as a "
        "multiple of the other clients' median. Larger updates are shortened, and logged. 0: 3 "
        "with `train.local-steps`, otherwise 10. Lower values hinder "
        "[backdoors](security.md#caps-on-averages).",
    )
    node_timeout: PositiveFloat = Field(
        120.0,
        description="Seconds to wait for `min-nodes` SuperNodes, and until the log names awaited "
        "clients.",
    )
    round_timeout: PositiveFloat = Field(
        3600.0,
        description="Seconds that a client has for a train or evaluate message; in simulation, "
        "without waiting for a free process.",
    )
    late_replies: bool = Field(
        False,
        description="Also average adapters that arrive after `round-timeout`, but before the "
        "following evaluation ends; averaging and evaluation are then repeated. Clients may "
        "train for twice `round-timeout` plus a minute. Not for `fl-glm`.",
    )
    keep_rounds: Literal["last", "all"] = Field(
        "last",
        description="Checkpoints that remain in the results: the last two, or all, so that "
        "`chambers withdraw` repeats only the rounds in which the client took part.",
    )
    output_dir: str = Field(
        "",
        description="Absolute path of the folder for runs' results. Empty: "
        "`~/.local/share/chambers/runs` (on Linux).",
    )
    report_to: str = Field(
        "",
        pattern=r"^(|(tensorboard|wandb|mlflow|trackio)(, ?(tensorboard|wandb|mlflow|trackio))*)$",
        description="Trackers that receive the metrics, with client names: `tensorboard`, "
        "`wandb`, `mlflow`, `trackio`, separated by commas. Empty: TensorBoard, if installed.",
    )
    state_path: str = Field(
        "",
        description="Absolute path, at the client, of the folder for its state. Empty: "
        "`~/.local/state/chambers` (on Linux).",
    )
    resume: str = Field("", description="Absolute path of the results folder of a run to resume.")
    initial_adapter: str = Field(
        "",
        description="Absolute path, on the server, of a PEFT adapter to begin with, which is "
        "also evaluated before round 1.",
    )
    instruction_key: str = Field(
        "",
        description="Absolute path of the coordinator's `instructions.key`, which signs "
        "instructions, or `none`. Required in deployments.",
    )
    model: ModelSettings = Field(default_factory=ModelSettings)
    adapter: AdapterSettings = Field(default_factory=AdapterSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    continual: ContinualSettings = Field(default_factory=ContinualSettings)
    fedprox: FedProxSettings = Field(default_factory=FedProxSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    split: SplitSettings = Field(default_factory=SplitSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    sums: SumSettings = Field(default_factory=SumSettings)

    @field_validator("output_dir", "state_path", "resume", "initial_adapter")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        return require_absolute(value)

    @field_validator("instruction_key")
    @classmethod
    def _is_absolute_or_none(cls, value: str) -> str:
        return value if value == UNSIGNED else require_absolute(value)

    @model_validator(mode="after")
    def _is_consistent(self) -> "RunConfig":
        if self.adapter.kind == "prefix" and self.model.gradient_checkpointing:
            raise ValueError(
                'adapter.kind = "prefix" can\'t be used with model.gradient-checkpointing = true: '
                "recomputed blocks can't use a prefix; lower train.batch-size or data.max-length"
            )
        if self.data.pool and self.min_nodes > 1:
            raise ValueError(
                f'data.pool = "{self.data.pool}" combines clients into a single one, but min-nodes '
                f"is {self.min_nodes}; set min-nodes to 1"
            )
        kind = self.data.partition
        if self.data.path and kind in {"label", "dirichlet"} and not self.data.partition_field:
            raise ValueError(
                f'data.partition = "{kind}" needs data.partition-field, the column with the label'
            )
        return self

    @model_validator(mode="after")
    def _suits_the_method(self) -> "RunConfig":
        values, usual = self.flat(), {key: field.default for key, field, _ in leaves(self)}
        for key, example in self.method.needs.items():
            if values[key] == usual[key]:
                raise ValueError(f'strategy = "{self.strategy}" needs {key}, such as {example}')
        for key, reason in self.method.forbids.items():
            if values[key] != usual[key]:
                raise ValueError(
                    f'{key} = {values[key]} is not for strategy = "{self.strategy}": {reason}'
                )
        return self

    @model_validator(mode="after")
    def _can_be_summed(self) -> "RunConfig":
        if not self.sums.enabled:
            return self
        if self.late_replies:
            raise ValueError("late-replies = true is not for sums.enabled = true")
        if self.evaluate.shown:
            raise ValueError(
                f"evaluate.show-answers = {self.evaluate.show_answers} would send single clients' "
                "texts; set it to 0 for sums.enabled = true"
            )
        if self.min_nodes < MIN_GROUP:
            raise ValueError(
                f"sums.enabled = true needs min-nodes of at least {MIN_GROUP}: the sum of two "
                "clients' updates would tell each the other's"
            )
        return self

    @model_validator(mode="after")
    def _can_have_ranks(self) -> "RunConfig":
        basis = "the components of the adapters change in every round"
        for key, is_used in (
            ('strategy = "fedjudge-cl"', self.method.penalty == "continual"),
            ('train.optimizer-state = "keep"', self.train.optimizer_state == "keep"),
            (f'server.update = "{self.server.update}"', self.server.update != "mean"),
            ("late-replies = true", self.late_replies),
            ("sums.enabled = true", self.sums.enabled),
        ):
            if self.adapter.ranks and is_used:
                raise ValueError(f"adapter.ranks is not for {key}: {basis}")
        return self

    @model_validator(mode="after")
    def _can_be_split(self) -> "RunConfig":
        if not self.method.is_split:
            return self
        if self.split.average_every and self.split.schedule != "hierarchical":
            raise ValueError(
                'split.average-every is for split.schedule = "hierarchical"; other schedules '
                "average at the end of a round, and train.local-steps can make rounds shorter"
            )
        if is_unspecified(self.split.listen) and not self.split.advertise:
            raise ValueError(
                f'split.advertise is needed with split.listen = "{self.split.listen}": clients '
                "can't connect to that address"
            )
        if self.split.body_hosts and not self.split.body_key:
            raise ValueError("split.body-key is needed with split.body-hosts")
        trained = self.train.batch_size * sum(self.row.values())
        for batch, row, tokens in (
            ("one micro-batch of train.batch-size", self.row, trained),
            (
                "a batch of answers of evaluate.batch-size",
                self.row_with_answer,
                self.max_generated_tokens,
            ),
        ):
            if tokens > self.split.activation_budget:
                raise ValueError(
                    f"split.activation-budget = {self.split.activation_budget} padded tokens is "
                    f"too small for {batch} × ({' + '.join(row)}) = {tokens}; raise the budget or "
                    "lower the other settings"
                )
        return self

    @property
    def method(self) -> Method:
        """What ``strategy`` means."""
        return METHODS[self.strategy]

    @property
    def takes_turns(self) -> bool:
        """Whether one client trains after another."""
        return self.method.is_split and self.split.schedule == "serial"

    @property
    def trains_at_once(self) -> bool:
        """Whether clients wait for each other within a round, so that all must train at once."""
        waits = self.split.schedule == "hierarchical" and self.split.average_every > 0
        return self.method.is_split and (self.split.schedule == "client-batch" or waits)

    @property
    def averages_importance(self) -> bool:
        """Whether the server averages the clients' importance J (FedJudge Eq. 3)."""
        return self.method.penalty == "continual" and self.continual.importance == "server"

    @property
    def row(self) -> dict[str, int]:
        """Settings whose sum is the maximum number of positions in a row, including its prefix."""
        before = self.adapter.columns_before
        prefix = {"adapter.prefix-length": before} if before else {}
        return prefix | {"data.max-length": self.data.max_length}

    @property
    def row_with_answer(self) -> dict[str, int]:
        """Like ``row``, plus the positions of a generated answer, if answers are generated."""
        answer = {"evaluate.max-new-tokens": self.evaluate.max_new_tokens}
        return self.row | (answer if self.evaluate.generate else {})

    @property
    def max_batch_tokens(self) -> int:
        """Maximum number of padded tokens in a client's micro-batch, prefixes included."""
        return max(self.train.batch_size, self.evaluate.batch_size) * sum(self.row.values())

    @property
    def max_training_tokens(self) -> int:
        """Maximum number of padded tokens in a micro-batch of training, prefixes included."""
        return self.train.batch_size * sum(self.row.values())

    @property
    def max_generated_tokens(self) -> int:
        """Maximum number of padded tokens in a generation batch; 0 without generation."""
        if not self.evaluate.generate:
            return 0
        return self.evaluate.batch_size * sum(self.row_with_answer.values())

    @property
    def excluded(self) -> set[str]:
        """The names in ``exclude``."""
        return {name.strip() for name in self.exclude.split(",") if name.strip()}

    def sampled(self, clients: int) -> int:
        """Return how many of the connected clients train in a round."""
        return min(clients, max(self.min_nodes, round(self.sample * clients)))

    @property
    def train_timeout(self) -> float:
        """Seconds that a client has for one train message, including those for a late reply."""
        return self.round_timeout + self.late_replies * self.reply_timeout

    @property
    def reply_timeout(self) -> float:
        """Seconds that the server waits for a reply: the time limit plus ``_GRACE_SECONDS``."""
        return self.round_timeout + _GRACE_SECONDS

    def with_targets(self, targets: str) -> "RunConfig":
        """Return the configuration with the names that were found from ``adapter.targets``."""
        adapter = self.adapter.model_copy(update={"targets": targets})
        return self.model_copy(update={"adapter": adapter})

    def with_rank(self, rank: int) -> "RunConfig":
        """Return the configuration of a client with an adapter of this rank."""
        return self.model_copy(update={"adapter": self.adapter.with_rank(rank)})

    def with_max_length(self, tokens: int) -> "RunConfig":
        """Return this configuration for rows of at most ``tokens`` tokens."""
        data = self.data.model_copy(update={"max_length": min(tokens, self.data.max_length)})
        return self.model_copy(update={"data": data})

    def flat(self) -> dict[str, Scalar]:
        """Return the configuration in Flower's flat form: scalars keyed by ``section.name``."""
        return {key: value for key, _, value in leaves(self)}

    def changed(self) -> dict[str, Scalar]:
        """Return the settings that differ from the defaults, in Flower's flat form."""
        usual = RunConfig().flat()
        return {key: value for key, value in self.flat().items() if value != usual[key]}


def parse_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Validate Flower's flat run configuration: scalars keyed by ``section.name``.

    Missing keys get their default values. If the configuration is invalid, raise ``ConfigError``,
    which names every unknown key and every invalid value, with the allowed values.
    """
    fields = {key: field for key, field, _ in leaves(RunConfig())}
    mistakes = [
        explain_unknown(key, value, fields) for key, value in values.items() if key not in fields
    ]
    nested: dict[str, Any] = {}
    for dotted in values.keys() & fields.keys():
        section, dot, key = dotted.rpartition(".")
        (nested.setdefault(section, {}) if dot else nested)[key] = values[dotted]
    try:
        config = RunConfig.model_validate(nested)
    except ValidationError as error:
        mistakes += [explain_problem(dict(problem), values, fields) for problem in error.errors()]
    if mistakes:
        raise ConfigError("the run config is invalid:\n" + "\n".join(mistakes))
    return config


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield the dotted key, field and value of every setting, in the order of declaration."""
    for name, field in type(section).model_fields.items():
        key, value = prefix + str(field.alias), getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, key + ".")
        else:
            yield key, field, value
