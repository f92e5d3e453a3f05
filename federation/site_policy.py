"""The site policy: an institution's TOML file that limits what a coordinator may request.

``client_app/policy.py`` applies the policy. The keys are described only in this module; the table
in ``docs/policy.md`` is generated from its models.
"""

import tomllib
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import platformdirs
from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from federation.methods import StrategyName
from federation.sum_settings import MIN_GROUP
from finetuning.errors import UserError
from finetuning.settings import Section


class PolicyError(UserError, ValueError):
    """The site's policy refuses a request, or can't be read; the message names the key or file."""


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError("must be an absolute path")
    return path


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class Table(Section, strict=True, populate_by_name=False):
    """A table of a site's file: immutable, with no unknown keys and no type conversion."""


_T = TypeVar("_T", bound=Table)


class SplitPolicy(Table):
    """Limits for split learning, which sends hidden states of private text to a block server."""

    allowed: bool = Field(
        False,
        description="Whether hidden states may be sent to a block server (`fl-glm`). Needs "
        "`coordinators`.",
    )
    min_head_blocks: int = Field(
        1,
        ge=0,
        description="Minimum of `split.head-blocks`. With 0, the coordinator can look up the "
        "text in the embedding table.",
    )
    noise: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of the noise on hidden states, relative to the root mean "
        "square of each token's. It is [no protection](attack.md#noise).",
    )


Accountant = Literal["rdp", "prv"]


class PrivacyPolicy(Table):
    """Row-level differential privacy for training that sends adapters."""

    epsilon: PositiveFloat | None = Field(
        None,
        description="Total ε budget of all training on these rows; training that would exceed it "
        "is refused. Required in the table `[privacy]`; without the table, there is no "
        "differential privacy.",
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="δ; must be less than 1 / number of training rows."
    )
    noise_multiplier: PositiveFloat = Field(
        1.0,
        description="σ: standard deviation of the noise on each step's sum of gradients, as a "
        "multiple of `row-norm`. More noise spends less ε.",
    )
    row_norm: PositiveFloat = Field(
        1.0, description="Maximum norm of a row's gradient; larger gradients are scaled down."
    )
    accountant: Accountant = Field(
        "rdp",
        description="How Opacus computes ε: `rdp` (Rényi), or `prv`, a numerical method whose "
        "ε is usually 4 to 20 % lower, but which fails for some values.",
    )
    account: AbsolutePath = Field(
        "",
        description="Absolute path of the account of spent ε, which all policies for these rows "
        "must name. Absent: `privacy.jsonl` in `~/.local/state/chambers` (on Linux).",
    )

    @property
    def account_file(self) -> Path:
        """Path of the privacy account."""
        return Path(self.account or platformdirs.user_state_path("chambers") / "privacy.jsonl")


class SumsPolicy(Table):
    """Masked sums: the coordinator learns only the sum of the adapters of a group."""

    only: bool = Field(
        False,
        description="Whether runs without [masked sums](masked-sums.md) are refused, which the "
        "other members of the group require.",
    )
    members: AbsolutePath = Field(
        "",
        description="Absolute path of the reviewer's signed list of groups, members.json. "
        "Required in the table `[sums]`, like the next two; without the table, no sums.",
    )
    reviewers: AbsolutePath = Field(
        "", description="Absolute path of `trusted.yaml`, whose reviewers may sign the list."
    )
    key: AbsolutePath = Field(
        "",
        description="Absolute path of this institution's private key, `peer`, which "
        "`chambers site join` writes.",
    )
    min_peers: int = Field(
        MIN_GROUP,
        ge=MIN_GROUP,
        description="Minimum number of members of the group, including this institution.",
    )
    max_share: float = Field(
        0.5, gt=0, le=1, description="Maximum of `max-share`, a member's largest share of a sum."
    )


class ReleasePolicy(Table):
    """Thresholds of the leak test that the site runs on a run's final global adapter."""

    max_auc: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Largest AUC with which the adapter tells training rows from held-out rows. "
        "With a threshold, the site tests the final global adapter (`chambers leaks`), and sends "
        'whether it has "passed" or is "refused" (not with masked sums), without figures, but also '
        "without the noise of `privacy.epsilon`; `fl-glm` is refused.",
    )
    max_extracted: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Largest share of training rows of which the adapter generates a rare span.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is a threshold."""
        return self.max_auc is not None or self.max_extracted is not None


class SitePolicy(Table):
    """Limits on what a coordinator may request from this institution."""

    strategies: list[StrategyName] | None = Field(
        None, description="Allowed strategies; `fl-glm` also needs `split.allowed`. Absent: all."
    )
    not_after: date | None = Field(
        None, description="Last day (UTC, as in 2027-12-31) on which messages are carried out."
    )
    purpose: str = Field(
        "", description="Purpose of the processing, which each line of the audit log repeats."
    )
    agreement: str = Field(
        "", description="The agreement on which it rests, repeated likewise: a name, date, number."
    )
    instruction_key: AbsolutePath = Field(
        "",
        description="Absolute path of `instructions.pub`. With it, only instructions signed by "
        "the coordinator are carried out: once, in order, and before they expire. Absent: "
        "instructions from anyone are.",
    )
    base_models: list[Digest] | None = Field(
        None,
        description="Digests of the allowed base models or, with `fl-glm`, of the parts that run "
        "here.",
    )
    hub_models: list[str] = Field(
        [],
        description="Hugging Face ids allowed as `model.name`. Models that aren't cached are "
        "downloaded, unless `HF_HUB_OFFLINE=1` is set, as in `docker/flower.env`. `smollm2` "
        "counts as `HuggingFaceTB/SmolLM2-135M-Instruct`; the built-in `tiny` is always allowed, "
        "unless `base-models` excludes it.",
    )
    paths: list[AbsolutePath] = Field(
        [],
        description="Folders that a run config may name as `model.name`, `data.path` or "
        "`state-path`, with all that they contain.",
    )
    adapter_targets: list[str] | None = Field(
        None,
        description="Names of the modules that LoRA may adapt, such as `q_proj`. Absent: the "
        "blocks' linear layers, except experts and routers. Adapters on embeddings and output "
        "heads [reveal the rows' words](attack.md#tokens-revealed-by-adapters).",
    )
    max_rank: PositiveInt | None = Field(
        None,
        description="Maximum of `adapter.rank`. The higher the rank, the more words of the rows "
        "can be computed from an adapter.",
    )
    max_prefix_length: PositiveInt | None = Field(
        None,
        description="Maximum of `adapter.prefix-length`. With each position, a coordinator can "
        "test whether a word occurs in the rows.",
    )
    coordinators: list[str] | None = Field(
        None,
        description="Block servers to which lanes may be opened: `host:port`, or `host` for any "
        "port. Absent: none.",
    )
    max_runs: PositiveInt | None = Field(
        None,
        description="Maximum number of runs that may train or evaluate here, counted in the "
        "audit log.",
    )
    max_rounds: PositiveInt | None = Field(
        None,
        description="Maximum number of train messages in a run, including failed and repeated "
        "ones. One more evaluate message is allowed; with `late-replies`, each round with late "
        "replies is evaluated again.",
    )
    max_steps: PositiveInt | None = Field(
        None, description="Maximum number of optimizer steps in a round."
    )
    max_seconds: PositiveFloat | None = Field(
        None,
        description="Maximum time for a message, in seconds: `round-timeout` or, with "
        "`late-replies`, twice that plus a minute.",
    )
    min_rows: PositiveInt = Field(
        1,
        description="Minimum number of rows from which each adapter, importance, loss or score "
        "that is sent is computed. A conversation is one row, and so is a line with several "
        "questions, as in MultiRC. Hidden states come from single rows.",
    )
    evaluation: bool = Field(
        True,
        description="Whether losses on held-out rows may be measured and sent.",
    )
    generation: bool = Field(
        False,
        description="Whether answers to held-out questions may be generated, and their scores "
        "sent (`evaluate.generate`).",
    )
    show_answers: bool = Field(
        False,
        description="Whether held-out questions, with reference and generated answers, may be "
        "sent as text (`evaluate.show-answers`), regardless of `min-rows`. No other text of "
        "rows is sent.",
    )
    audit_log: AbsolutePath = Field(
        "",
        description="Absolute path of the audit log. Absent: `audit.jsonl` in "
        "`~/.local/state/chambers` (on Linux).",
    )
    split: SplitPolicy = SplitPolicy()
    privacy: PrivacyPolicy = PrivacyPolicy()
    sums: SumsPolicy = SumsPolicy()
    release: ReleasePolicy = ReleasePolicy()

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        named, sums = self.model_fields_set, self.sums
        if "sums" in named and not (sums.members and sums.reviewers and sums.key):
            raise ValueError("sums needs members, reviewers and key")
        if "privacy" in named and self.privacy.epsilon is None:
            raise ValueError("privacy needs epsilon; without epsilon, nothing is private")
        if "release" in named and not self.release.is_set:
            raise ValueError("release needs max-auc or max-extracted; without, nothing is tested")
        if self.split.allowed and not self.coordinators:
            raise ValueError("split.allowed = true needs coordinators: addresses of block servers")
        return self

    @property
    def audit_file(self) -> Path:
        """Path of the audit log."""
        return Path(self.audit_log or platformdirs.user_state_path("chambers") / "audit.jsonl")


def read_table(path: Path, kind: type[_T], what: str) -> _T:
    """Read a site's TOML file; ``what`` describes it in error messages.

    Raise ``PolicyError``, which names the file and the key, if the file is missing or malformed.
    """
    try:
        return kind.model_validate(tomllib.loads(path.read_text("utf-8-sig")))
    except ValidationError as error:
        mistakes = "; ".join(explain(dict(problem)) for problem in error.errors())
        raise PolicyError(f"{what} {path} is invalid: {mistakes}") from error
    except OSError as error:
        raise PolicyError(f"{what} {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{what} {path} is not TOML: {error}") from error


def read_policy(path: str) -> SitePolicy:
    """Read a policy.

    Raise ``PolicyError`` if the file is missing or malformed (see ``read_table``), or requires a
    package that isn't installed.
    """
    if not Path(path).is_absolute():
        raise PolicyError(f"the path of the site's policy, {path!r}, must be absolute")
    policy = read_table(Path(path), SitePolicy, "the site's policy")
    if policy.privacy.epsilon is not None and find_spec("opacus") is None:
        raise PolicyError(
            f"the site's policy {path} has privacy.epsilon, but Opacus, which computes the spent "
            "ε, is not installed: run pip install 'chambers[privacy]'"
        )
    return policy


def explain(problem: dict[str, Any]) -> str:
    """Return a key and its error, without the value, which is private to the site."""
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; docs/policy.md lists all keys"
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type":
        reason = "must be text, in quotation marks"
    return f"{key}: {reason}" if key else reason
