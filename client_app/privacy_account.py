"""The privacy account: what private training has spent of an institution's ε, on its own disk.

Every step of every run that trains on the same rows counts, whichever coordinator asked for it. The
file is only appended to, before a round is trained: a crash costs budget and never gives any back.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from client_app.audit import AuditLog
from federation.site_policy import PolicyError, PrivacyPolicy
from finetuning.data.batching import steps_per_round
from finetuning.settings import TrainSettings


@dataclass(frozen=True)
class PrivateSteps:
    """Steps of training with differential privacy.

    Attributes:
        sampling_rate: q: the probability of each row in each step.
        noise_multiplier: σ, as a multiple of the policy's ``row-norm``.
        steps: Number of steps.

    """

    sampling_rate: float
    noise_multiplier: float
    steps: int


def private_steps(
    policy: PrivacyPolicy, settings: TrainSettings, rows: int, rounds: int = 1
) -> PrivateSteps:
    """Return the steps of rounds of training on a number of rows, examples or not."""
    rate = min(1.0, settings.batch_size * settings.accumulation / rows)
    return PrivateSteps(rate, policy.noise_multiplier, rounds * steps_per_round(rows, settings))


def epsilon(spent: Iterable[PrivateSteps], delta: float) -> float:
    """Return ε at δ of all steps together, by Rényi differential privacy.

    The bound holds for Poisson sampling and for rows that are added, removed, or replaced by one
    without a gradient (Mironov, Talwar and Zhang, 2019).
    """
    from opacus.accountants import RDPAccountant

    total: Counter[tuple[float, float]] = Counter()
    for part in spent:
        total[part.noise_multiplier, part.sampling_rate] += part.steps
    history = [(noise, rate, steps) for (noise, rate), steps in total.items() if steps]
    accountant = RDPAccountant()
    accountant.load_state_dict({"history": history, "mechanism": "rdp"})
    return float(accountant.get_epsilon(delta))


class PrivacyAccount:
    """The account of one institution's rows.

    Args:
        policy: The site's ε, δ and account file.

    """

    def __init__(self, policy: PrivacyPolicy) -> None:
        assert policy.epsilon is not None
        self._epsilon, self._delta = policy.epsilon, policy.delta
        self._log = AuditLog(policy.account_file, "privacy account")

    def spend(self, steps: PrivateSteps, about: Mapping[str, Any]) -> float:
        """Record steps before they are trained; return ε of everything so far.

        Raises:
            PolicyError: ε would exceed the policy's; nothing is recorded.
            AuditError: The account can't be written.

        """
        spent = 0.0

        def check(lines: Iterable[Mapping[str, Any]]) -> None:
            nonlocal spent
            spent = self._check(_read(lines), steps)

        self._log.append({**about, **account_line(steps)}, check)
        return spent

    def check(self, steps: PrivateSteps) -> None:
        """Check whether steps could be trained.

        Raises:
            PolicyError: ε would exceed the policy's.

        """
        self._check(_read(self._log.lines()), steps)

    def _check(self, before: list[PrivateSteps], steps: PrivateSteps) -> float:
        spent = epsilon([*before, steps], self._delta)
        if not spent <= self._epsilon:
            left = self._steps_left(before, steps)
            raise PolicyError(
                f"the site's policy refuses {steps.steps} steps of training at a sampling rate of "
                f"{steps.sampling_rate:.3g}: {left} are left (privacy.epsilon = {self._epsilon:g} "
                f"at privacy.delta = {self._delta:g}, of which "
                f"{epsilon(before, self._delta):.3g} is spent)"
            )
        return spent

    def _steps_left(self, before: list[PrivateSteps], steps: PrivateSteps) -> int:
        def total(count: int) -> float:
            more = PrivateSteps(steps.sampling_rate, steps.noise_multiplier, count)
            return epsilon([*before, more], self._delta)

        return max(0, bisect_right(range(steps.steps), self._epsilon, key=total) - 1)


def account_line(steps: PrivateSteps) -> dict[str, Any]:
    """Return what a line of the account says of steps."""
    return {key.replace("_", "-"): value for key, value in asdict(steps).items()}


def _read(lines: Iterable[Mapping[str, Any]]) -> list[PrivateSteps]:
    try:
        return [
            PrivateSteps(
                float(line["sampling-rate"]), float(line["noise-multiplier"]), int(line["steps"])
            )
            for line in lines
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            "the site's privacy account has a line that is not an entry, so that the ε that is "
            "left can't be computed; restore the file (docs/operations.md)"
        ) from error
