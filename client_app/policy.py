"""Refuse requests that the site's policy doesn't allow.

The coordinator controls the run config and every message, and can change them at any time. All
checks are therefore repeated for each message, and accepted messages are counted in the site's
audit log.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from client_app.institution import Institution
from federation.messages import Instruction
from federation.run_config import RunConfig
from federation.site_policy import PolicyError, SitePolicy, SumsPolicy
from finetuning.adapters.adapted_modules import adapted_modules
from finetuning.data.batching import steps_per_round
from finetuning.data.tokenization import Example
from finetuning.model.fingerprint import combine_digests
from finetuning.model.locating import locate_description
from finetuning.model.names import TINY, hub_id
from finetuning.settings import AdapterSettings
from split.settings import SplitSettings


def check_run(policy: SitePolicy, config: RunConfig) -> None:
    """Raise ``PolicyError`` for settings that the policy doesn't allow.

    These settings are checked before any access to a file or model that the run config names.
    """
    ends = policy.not_after or date.max
    require(datetime.now(UTC).date() <= ends, "messages after its end", f"not-after = {ends}")
    if policy.strategies is not None:
        known = config.strategy in policy.strategies
        require(known, f'strategy = "{config.strategy}"', "not in its strategies")
    model = config.model.name
    known = model == TINY or hub_id(model) in policy.hub_models or _is_within(model, policy.paths)
    require(known, f'model.name = "{model}"', "not in its hub-models or paths")
    for key, path in (("data.path", config.data.path), ("state-path", config.state_path)):
        known = not path or _is_within(path, policy.paths)
        require(known, f'{key} = "{path}"', "not in its paths")
    timeout = "2 * round-timeout + 60" if config.late_replies else "round-timeout"
    for name, value, key, limit in (
        ("rounds", config.rounds, "max-rounds", policy.max_rounds),
        (timeout, config.train_timeout, "max-seconds", policy.max_seconds),
        ("train.local-steps", config.train.local_steps, "max-steps", policy.max_steps),
        _size(config.adapter, policy),
    ):
        _at_most(name=name, value=value, key=key, limit=limit)
    generates = config.evaluate.generate
    require(policy.generation or not generates, "evaluate.generate = true", "generation = false")
    require(
        policy.show_answers or not config.evaluate.shown,
        f"evaluate.show-answers = {config.evaluate.show_answers}",
        "show-answers = false",
    )
    if policy.privacy.epsilon is not None:
        _check_privacy(config)
    _check_sums(policy.sums, config)
    if config.strategy == "fedjudge-cl":
        _check_importance(policy, config)
    if config.strategy == "fl-glm":
        asked = 'strategy = "fl-glm"'
        require(not policy.release.is_set, asked, "release: the leak test needs the whole model")
        _check_split(policy, config.split)


def check_adapter(policy: SitePolicy, config: RunConfig) -> None:
    """Raise ``PolicyError`` if LoRA would adapt a module that the policy doesn't allow.

    Reads the base model's configuration, but neither its weights nor data. Raise ``BaseModelError``
    if there is no such model, or the targets don't fit it.
    """
    settings, named = config.adapter, policy.adapter_targets
    modules = adapted_modules(locate_description(config.model.name), settings)
    for path, mixes_tokens in modules.items():
        if named is None:
            known = mixes_tokens
            reason = "not a linear layer of a block that all tokens pass through"
        else:
            known = any(f".{path}".endswith(f".{name}") for name in named)
            reason = "not in its adapter-targets"
        asked = f'adapter.targets = "{settings.targets}", which adapts {path}'
        require(known, asked, reason)
        # The rows of an embedding that only one member's texts use would appear unsummed.
        hides = mixes_tokens or not config.sums.enabled or policy.privacy.epsilon is not None
        require(hides, asked, "sums: the words of one member's rows are not hidden by a sum")


def check_institution(policy: SitePolicy, config: RunConfig, institution: Institution) -> None:
    """Raise ``PolicyError`` if the policy doesn't allow the base model, or a round's size.

    The numbers of rows and steps in a round depend on the institution's data.
    """
    base = combine_digests(institution.fingerprint)
    if policy.base_models is not None:
        require(base in policy.base_models, f"the base model {base}", "not in its base-models")
    count, rows = len(institution.train), _rows(institution.train)
    if policy.privacy.epsilon is not None:
        # Count all rows: the number of rows that yield examples would reveal private information.
        count = rows = institution.size
        require(
            not institution.rows_divided,
            "training with a chat template that divides rows into several examples",
            "privacy.epsilon: single examples are protected, not rows",
        )
        require(
            institution.lines == institution.size,
            f'data.task = "{config.data.task}", which divides a line into several rows',
            "privacy.epsilon: single rows are protected, not lines",
        )
        delta = policy.privacy.delta
        # With δ = 1 / rows, publishing a random row would count as differentially private.
        require(delta * count < 1, "training with so many rows", f"privacy.delta = {delta:g}")
    most = config.train.local_steps * config.train.batch_size * config.train.accumulation
    _check_rows("training", min(rows, most or rows), policy)
    steps = steps_per_round(count, config.train)
    _at_most(name="steps", value=steps, key="max-steps", limit=policy.max_steps)


def check_request(
    policy: SitePolicy,
    kind: str,
    instruction: Instruction,
    config: RunConfig,
    institution: Institution,
) -> None:
    """Raise ``PolicyError`` if the policy doesn't allow what a train or evaluate message requests.

    Values that would be computed from too few rows are not allowed, either.
    """
    limit = instruction.time_limit
    _at_most(name="the time limit", value=limit, key="max-seconds", limit=policy.max_seconds)
    _at_most(name="round", value=instruction.round, key="max-rounds", limit=policy.max_rounds)
    private = policy.privacy.epsilon is not None
    require(
        not (private and instruction.importance),
        "importance",
        "privacy.epsilon: the importance J is computed without noise",
    )
    if kind == "evaluate" and instruction.losses:
        _check_rows("evaluation", _rows(institution.test), policy)
        if config.evaluate.generate:
            _check_rows("generation", _rows(institution.asked), policy)
    if instruction.importance:
        source = config.continual.importance
        used_in = "train" if source == "client" else "evaluate"
        settings = f'"{config.strategy}" with continual.importance = "{source}"'
        require(
            config.strategy == "fedjudge-cl" and kind == used_in,
            f"importance in {kind} messages",
            f"strategy = {settings} doesn't use it",
        )
        used = institution.drawn(config.seed, config.continual.importance_examples)
        _check_rows("importance", _rows(used), policy)


def check_steps(
    policy: SitePolicy,
    examples: Sequence[Example],
    steps: Sequence[Sequence[int]],
    average_every: int,
) -> None:
    """Raise ``PolicyError`` if an adapter would be sent after too few rows.

    ``steps`` contains the indices of the examples in each step of the round. Within the round,
    adapters are sent after every ``average_every`` steps; 0 means never.
    """
    every = average_every or len(steps)
    for first in range(0, len(steps), every):
        used = (examples[index] for step in steps[first : first + every] for index in step)
        _check_rows("training", _rows(used), policy)


def check_address(policy: SitePolicy, address: str) -> None:
    """Raise ``PolicyError`` unless the policy allows a lane to a block server's address."""
    known = {entry.lower() for entry in policy.coordinators or ()}
    host = address.lower().rpartition(":")[0]
    listed = {address.lower(), host, host.strip("[]")} & known
    require(bool(listed), f"a lane to {address}", "not in its coordinators")


def check_counts(
    policy: SitePolicy, about: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> None:
    """Raise ``PolicyError`` if a message exceeds ``max-runs`` or ``max-rounds``.

    ``about`` contains the message's ``kind``, ``run`` and ``client``; ``lines`` is the audit log.
    """
    if policy.max_runs is None and policy.max_rounds is None:
        return
    accepted = [
        (line.get("run"), line.get("kind"))
        for line in lines
        if line.get("event") == "accepted" and line.get("client") == about["client"]
    ]
    runs = {run for run, _ in accepted} | {about["run"]}
    _at_most(name="runs", value=len(runs), key="max-runs", limit=policy.max_runs)
    number = accepted.count((about["run"], about["kind"])) + 1
    # Allow one more evaluation than rounds, since a run also evaluates before the first round.
    spare = about["kind"] == "evaluate"
    name = f"{about['kind']} messages"
    _at_most(name=name, value=number - spare, key="max-rounds", limit=policy.max_rounds)


def _size(settings: AdapterSettings, policy: SitePolicy) -> tuple[str, int, str, int | None]:
    """Return the name and value of the setting of an adapter's size, and the policy's limit."""
    if settings.kind == "prefix":
        length, limit = settings.prefix_length, policy.max_prefix_length
        return "adapter.prefix-length", length, "max-prefix-length", limit
    return "adapter.rank", settings.rank, "max-rank", policy.max_rank


def _check_privacy(config: RunConfig) -> None:
    """Refuse settings that violate differential privacy, whatever the strategy."""
    require(
        not config.evaluate.shown,
        f"evaluate.show-answers = {config.evaluate.show_answers}",
        "privacy.epsilon: answers contain text of single rows",
    )
    require(
        not config.evaluate.alone,
        "evaluate.alone = true",
        "privacy.epsilon: the model alone would be trained without noise",
    )
    require(
        config.train.optimizer_state == "reset",
        'train.optimizer-state = "keep"',
        "privacy.epsilon: an optimizer state could come from training without noise",
    )
    require(
        config.model.quantization != "int8",
        'model.quantization = "int8"',
        "privacy.epsilon: rows of a batch are quantised together, so each one changes the "
        "gradients of the others",
    )


def _check_sums(policy: SumsPolicy, config: RunConfig) -> None:
    """Check whether adapters must be, or may be, sent as parts of masked sums."""
    require(
        config.sums.enabled or not policy.only,
        "a run with sums.enabled = false",
        "sums.only = true",
    )
    if config.sums.enabled:
        require(bool(policy.key), "sums.enabled = true", "it has no table [sums]")
        share = policy.max_share
        _at_most(name="max-share", value=config.max_share, key="sums.max-share", limit=share)


def _check_importance(policy: SitePolicy, config: RunConfig) -> None:
    """Check whose importance J is used in training, and from how many rows J is computed."""
    require(
        policy.privacy.epsilon is None or config.continual.importance != "client",
        'continual.importance = "client"',
        "privacy.epsilon: the site's own importance has no noise, and would steer its training",
    )
    used = config.continual.importance_examples
    require(
        used >= policy.min_rows or policy.privacy.epsilon is not None,
        f"continual.importance-examples = {used}",
        f"min-rows = {policy.min_rows}",
    )


def _check_split(policy: SitePolicy, split: SplitSettings) -> None:
    """Check whether hidden states may be sent, after how many blocks, and to where."""
    require(
        policy.privacy.epsilon is None,
        'strategy = "fl-glm"',
        "privacy.epsilon: hidden states of single rows would be sent, which no ε covers",
    )
    require(policy.split.allowed, 'strategy = "fl-glm"', "split.allowed = false")
    require(
        split.head_blocks >= policy.split.min_head_blocks,
        f"split.head-blocks = {split.head_blocks}",
        f"split.min-head-blocks = {policy.split.min_head_blocks}",
    )
    if split.advertise or not split.listen.endswith(":0"):
        check_address(policy, split.advertise or split.listen)


def _is_within(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path, with links and ``..`` resolved, is in one of the folders."""
    try:
        target = Path(path).expanduser()
        return target.is_absolute() and any(
            target.resolve().is_relative_to(Path(folder).resolve()) for folder in folders
        )
    except (OSError, RuntimeError, ValueError):  # symlink loop, unknown user, null character
        return False


def _rows(examples: Iterable[Example]) -> int:
    """Return the number of input lines of the examples; a policy counts each line as a row.

    A task can split a line into several rows, and a template can split a row into several examples.
    """
    return len({example.origin for example in examples})


def _check_rows(what: str, rows: int, policy: SitePolicy) -> None:
    # Omit the number of rows, which would reveal how few rows the institution has.
    fewest = policy.min_rows
    require(rows >= fewest, f"{what} with too few of its rows", f"min-rows = {fewest}")


def _at_most(name: str, value: float, key: str, limit: float | None) -> None:
    # `value > limit` would accept NaN.
    require(limit is None or value <= limit, f"{name} = {value}", f"{key} = {limit}")


def require(allowed: bool, asked: str, reason: str) -> None:
    """Raise ``PolicyError`` unless the request is allowed."""
    if not allowed:
        raise PolicyError(f"the site's policy refuses {asked} ({reason})")
