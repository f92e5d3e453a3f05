"""The privacy account: a local file that records the privacy loss ε of an institution's rows.

The account includes every training step on the same rows, for all runs and coordinators. The file
is append-only, and is written before each round's training: a crash may overstate the privacy loss,
but never understates it. Each round is then recorded in the audit log of the site's policy, too, so
an account that was lost is noticed, and can be restored.
"""

import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from client_app.audit import AuditLog
from federation.site_policy import Accountant, PolicyError, PrivacyPolicy, SitePolicy
from finetuning.data.batching import steps_per_round
from finetuning.settings import TrainSettings, kebab_case


@dataclass(frozen=True, config=ConfigDict(alias_generator=kebab_case, populate_by_name=True))
class PrivateSteps:
    """Steps of training with differential privacy; also the fields of a line of the account."""

    sampling_rate: float  # q: the probability that a row is sampled in a step
    noise_multiplier: float  # σ, as a multiple of the policy's ``row-norm``
    steps: int


LINE = TypeAdapter(PrivateSteps)  # its aliases, such as ``sampling-rate``, are the line's fields


def private_steps(
    policy: PrivacyPolicy, settings: TrainSettings, rows: int, rounds: int = 1
) -> PrivateSteps:
    """Return the steps of ``rounds`` rounds; ``rows`` includes rows that yield no example."""
    rate = min(1.0, settings.batch_size * settings.accumulation / rows)
    return PrivateSteps(rate, policy.noise_multiplier, rounds * steps_per_round(rows, settings))


def epsilon(spent: Iterable[PrivateSteps], delta: float, accountant: Accountant = "rdp") -> float:
    """Return the total ε of all steps at δ, by Rényi or by privacy random variables (``prv``).

    The bounds hold for Poisson sampling, and for datasets that differ in a row that is added,
    removed, or replaced by a row with zero gradient (Mironov, Talwar and Zhang, 2019; Gopi, Lee and
    Wutschitz, 2021). Raise ``PolicyError`` if the accountant can't compute ε.
    """
    from opacus.accountants import PRVAccountant, RDPAccountant

    history = [(noise, rate, steps) for (noise, rate), steps in _total(spent).items() if steps]
    if accountant == "rdp" or not history:
        by_order = RDPAccountant()
        by_order.load_state_dict({"history": history, "mechanism": "rdp"})
        return float(by_order.get_epsilon(delta))
    numerical = PRVAccountant()
    numerical.load_state_dict({"history": history, "mechanism": "prv"})
    try:
        with np.errstate(divide="ignore"):  # of a sampling rate of 1
            return float(numerical.get_epsilon(delta))
    except (RuntimeError, ValueError) as error:
        raise PolicyError(
            f'ε can\'t be computed with privacy.accountant = "prv" ({error}); use "rdp"'
        ) from error


def _total(spent: Iterable[PrivateSteps]) -> Counter[tuple[float, float]]:
    """Return the number of steps with each noise multiplier and sampling rate."""
    total: Counter[tuple[float, float]] = Counter()
    for part in spent:
        total[part.noise_multiplier, part.sampling_rate] += part.steps
    return total


class PrivacyAccount:
    """The privacy account of one institution's rows; ``policy`` contains ε, δ and the paths.

    Each method raises ``PolicyError`` if the account has a line that is not an entry, or has fewer
    steps than the policy's audit log. It may have more: other policies can name the same account.
    """

    def __init__(self, policy: SitePolicy) -> None:
        assert policy.privacy.epsilon is not None
        self._epsilon, self._delta = policy.privacy.epsilon, policy.privacy.delta
        self._accountant = policy.privacy.accountant
        self._log = AuditLog(policy.privacy.account_file, "privacy account", False)
        self._audit_log = AuditLog(policy.audit_file)

    def spend(self, steps: PrivateSteps, about: Mapping[str, Any]) -> float:
        """Record steps before they are run; return the total ε, including these steps.

        Raise ``PolicyError``, without recording the steps, if ε would exceed the policy's limit, or
        ``AuditError`` if the account can't be written.
        """
        spent: list[float] = []
        line = {**about, **LINE.dump_python(steps, by_alias=True)}
        self._log.append(line, lambda lines: spent.append(self._check(lines, steps)))
        return spent[0]

    def check(self, steps: PrivateSteps) -> None:
        """Raise ``PolicyError`` if ε would exceed the policy's limit; don't record the steps."""
        self._check(self._log.lines(), steps)

    def spent(self) -> float:
        """Return the total ε of all recorded steps."""
        return self._total_epsilon(self._entries(self._log.lines()))

    def _total_epsilon(self, spent: Iterable[PrivateSteps]) -> float:
        return epsilon(spent, self._delta, self._accountant)

    def _entries(self, lines: Iterable[Mapping[str, Any]]) -> list[PrivateSteps]:
        """Return the entries in the account's lines, and compare them with the audit log."""
        # Read the audit log first: its lines are written after the account's.
        logged = [line for line in self._audit_log.lines() if line.get("event") == "privacy"]
        entries = _parse(self._log, lines)
        missing = _total(_parse(self._audit_log, logged)) - _total(entries)
        if missing:
            event, account, folder, *logs = (
                shlex.quote(str(each))
                for each in (
                    '"event": "privacy"',
                    self._log.path,
                    self._log.path.parent,
                    *self._audit_log.files(),
                )
            )
            raise PolicyError(
                "the site's privacy account lacks training steps that the audit log contains "
                f"({missing.total()}), so the remaining ε can't be computed: restore the account, "
                "also from the audit logs of other policies that name it (docs/operations.md): "
                f"grep --no-filename {event} {' '.join(logs)} > {account} && chmod 600 {account} "
                f"&& chown --reference={folder} {account}"
            )
        return entries

    def _check(self, lines: Iterable[Mapping[str, Any]], steps: PrivateSteps) -> float:
        before = self._entries(lines)
        spent = self._total_epsilon([*before, steps])
        if not spent <= self._epsilon:
            left = self._steps_left(before, steps)
            raise PolicyError(
                f"the site's policy refuses {steps.steps} steps of training at a sampling rate of "
                f"{steps.sampling_rate:.3g}: {left} are left (privacy.epsilon = {self._epsilon:g} "
                f"at privacy.delta = {self._delta:g}; already spent: "
                f"{self._total_epsilon(before):.3g})"
            )
        return spent

    def _steps_left(self, before: list[PrivateSteps], steps: PrivateSteps) -> int:
        def total(count: int) -> float:
            more = PrivateSteps(steps.sampling_rate, steps.noise_multiplier, count)
            return self._total_epsilon([*before, more])

        return max(0, bisect_right(range(steps.steps), self._epsilon, key=total) - 1)


def _parse(log: AuditLog, lines: Iterable[Mapping[str, Any]]) -> list[PrivateSteps]:
    try:
        return [LINE.validate_python(line) for line in lines]
    except ValidationError as error:
        raise PolicyError(
            f"the site's {log.title} contains a line that is not an entry, so the remaining ε "
            "can't be computed: restore the file (docs/operations.md)"
        ) from error
