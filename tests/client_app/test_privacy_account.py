"""The privacy account: ε as the library computes it, over runs and restarts, and refusals."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import norm

from client_app.audit import AuditLog
from client_app.privacy_account import LINE, PrivacyAccount, PrivateSteps, epsilon, private_steps
from federation.site_policy import PolicyError, SitePolicy
from finetuning.settings import TrainSettings

ABOUT = {"run": "one", "round": 1}


def terms(path: Path, epsilon: float, **changes: Any) -> SitePolicy:
    privacy = {"epsilon": epsilon, "delta": 1e-5, "account": str(path / "privacy.jsonl"), **changes}
    return SitePolicy.model_validate({"audit-log": str(path / "audit.jsonl"), "privacy": privacy})


def test_epsilon_over_runs_and_restarts_is_that_of_the_library(tmp_path):
    from opacus.accountants import RDPAccountant

    reference = RDPAccountant()
    # Two runs' rates, a changed policy's noise, and steps that use every row.
    for part in (
        PrivateSteps(0.05, 1.0, 40),
        PrivateSteps(0.1, 1.0, 7),
        PrivateSteps(0.05, 1.5, 20),
        PrivateSteps(0.05, 1.0, 1),
        PrivateSteps(1.0, 8.0, 2),
    ):
        for _ in range(part.steps):
            reference.step(noise_multiplier=part.noise_multiplier, sample_rate=part.sampling_rate)
        # As after a restart, the account is read from the disk.
        spent = PrivacyAccount(terms(tmp_path, 100.0)).spend(part, ABOUT)
        assert spent == pytest.approx(reference.get_epsilon(1e-5), rel=1e-9)
    assert spent > 1


@pytest.mark.parametrize(
    ("multiplier", "rate", "expected"), [(1.0, 0.1, 1.6845), (0.6, 0.3, 6.3253), (2.0, 0.5, 1.3536)]
)
def test_the_numerical_accountant_bounds_a_step_tightly(multiplier, rate, expected):
    # ``expected`` solves δ(ε) = 1e-5, with δ(ε) = ∫ max(0, p(x) - exp(ε) q(x)) dx on a fine grid.
    step = [PrivateSteps(rate, multiplier, 1)]
    assert expected < epsilon(step, 1e-5, "prv") < expected + 0.02 < epsilon(step, 1e-5)


@pytest.mark.parametrize("steps", [1, 16])
def test_the_numerical_accountant_bounds_gaussian_noise_tightly(steps):
    def delta(found):  # Balle and Wang (2018), theorem 8, of the composition's single Gaussian
        shift = steps**0.5 / 2
        below = [norm.cdf(side * shift / 2 - found / shift) for side in (1, -1)]
        return below[0] - math.exp(found) * below[1]

    found = epsilon([PrivateSteps(1.0, 2.0, steps)], 1e-5, "prv")
    assert delta(found) < 1e-5 < delta(found - 0.02)


def test_an_account_can_be_continued_with_the_other_accountant(tmp_path):
    steps = PrivateSteps(0.05, 1.0, 60)
    by_order = PrivacyAccount(terms(tmp_path, 5.0)).spend(steps, ABOUT)
    numerical = PrivacyAccount(terms(tmp_path, 5.0, accountant="prv"))
    assert 0.7 * by_order < numerical.spent() < 0.97 * by_order
    assert numerical.spend(steps, ABOUT) == epsilon([steps] * 2, 1e-5, "prv")


def test_steps_are_refused_beyond_epsilon_and_exactly_there(tmp_path):
    account = PrivacyAccount(terms(tmp_path, 3.0))
    account.spend(PrivateSteps(0.05, 1.0, 30), ABOUT)
    before = (tmp_path / "privacy.jsonl").read_bytes()
    with pytest.raises(PolicyError, match=r"privacy\.epsilon = 3 .*already spent") as error:
        account.spend(PrivateSteps(0.05, 1.0, 1000), ABOUT)
    left = int(str(error.value).partition(": ")[2].partition(" are left")[0])
    assert (tmp_path / "privacy.jsonl").read_bytes() == before
    assert left > 10
    with pytest.raises(PolicyError, match=f": {left} are left"):
        account.check(PrivateSteps(0.05, 1.0, left + 1))
    account.check(PrivateSteps(0.05, 1.0, left))
    assert account.spend(PrivateSteps(0.05, 1.0, left), ABOUT) <= 3.0
    with pytest.raises(PolicyError, match=": 0 are left"):
        account.spend(PrivateSteps(0.05, 1.0, 1), ABOUT)


def test_a_line_that_a_power_failure_cut_was_never_trained(tmp_path):
    account = PrivacyAccount(terms(tmp_path, 5.0))
    first = account.spend(PrivateSteps(0.05, 1.0, 10), ABOUT)
    file = tmp_path / "privacy.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    second = account.spend(PrivateSteps(0.05, 1.0, 10), ABOUT)
    assert first < second < 2 * first
    assert [json.loads(file.read_bytes().splitlines()[i])["steps"] for i in (0, 1)] == [10, 10]


@pytest.mark.parametrize("line", ['{"event": "reply"}\n', '{"sampling-rate": 0.0\n', "[]\n"])
def test_an_account_with_damaged_or_foreign_lines_is_refused(tmp_path, line):
    (tmp_path / "privacy.jsonl").write_text(line)
    with pytest.raises(PolicyError, match="restore the file"):
        PrivacyAccount(terms(tmp_path, 5.0)).spend(PrivateSteps(0.05, 1.0, 1), ABOUT)


def test_an_account_with_fewer_steps_than_the_log_is_refused(tmp_path):
    folder = tmp_path / "the site's state"
    policy = terms(folder, 5.0)
    account, file = PrivacyAccount(policy), policy.privacy.account_file
    parts = [PrivateSteps(0.05, 1.0, 10), PrivateSteps(0.1, 1.0, 7), PrivateSteps(0.05, 1.0, 20)]
    for part in parts:
        account.spend(part, ABOUT)
        line = LINE.dump_python(part, by_alias=True)
        AuditLog(policy.audit_file).append({"event": "privacy", **ABOUT, **line})
        AuditLog(policy.audit_file).append({"event": "reply", **ABOUT})
    more = PrivateSteps(0.05, 1.0, 100)
    account.spend(more, {"run": "another policy's"})
    assert account.spent() == epsilon([*parts, more], 1e-5)
    first, second, third, last = file.read_text().splitlines(keepends=True)
    one = PrivateSteps(0.05, 1.0, 1)
    for lines, missing in (([], 37), ([first, second], 20), ([first, third, last], 7)):
        file.write_text("".join(lines))
        for use in (account.spent, lambda: account.check(one), lambda: account.spend(one, ABOUT)):
            with pytest.raises(PolicyError, match=rf"audit log contains \({missing}\)") as error:
                use()
        assert file.read_text() == "".join(lines)
    file.unlink()
    command = str(error.value).partition("(docs/operations.md): ")[2]
    subprocess.run(["bash", "-ec", command], check=True)
    assert account.spent() == epsilon(parts, 1e-5)
    assert file.stat().st_mode & 0o777 == 0o600


def test_rates_and_steps_are_those_of_the_settings(tmp_path):
    settings = TrainSettings(batch_size=2, accumulation=8, epochs=3)
    policy = terms(tmp_path, 1.0, **{"noise-multiplier": 1.25}).privacy
    assert private_steps(policy, settings, 100, 2) == PrivateSteps(0.16, 1.25, 2 * 3 * 7)
    assert private_steps(policy, settings, 10) == PrivateSteps(1.0, 1.25, 3)
