"""FedProx with clients and server, and settings with which it is refused."""

import pytest
import torch

from federation.run_config import ConfigError, parse_run_config
from tests.in_process import run_in_process


def test_training_adds_the_proximal_gradient_in_every_round(values, tmp_path):
    values |= {"strategy": "fedprox", "fedprox.mu": 0.5, "rounds": 2, "train.local-steps": 3}
    journal = run_in_process(values, tmp_path, 3)
    trained = [e for e in journal.events if e["event"] == "train"]
    assert len(trained) == 6
    for event in trained:
        assert event["penalty"] == pytest.approx(0.25 * event["distance"] ** 2, rel=1e-5)
        assert 0 < event["penalty_gradient_share"] < 1
    last = {e["client"]: e["distance"] for e in trained if e["round"] == 2}
    for name, distance in last.items():
        moved = sum(
            (journal.kept[name][key] - value).square().sum()
            for key, value in journal.adapters[1].items()
        )
        assert distance == pytest.approx(float(moved) ** 0.5, rel=1e-4)


def test_a_larger_mu_keeps_local_adapters_nearer(values, tmp_path):
    values |= {"rounds": 1, "strategy": "fedprox"}

    def run(mu: float, **changes):
        own = values | {"fedprox.mu": mu} | changes
        return run_in_process(own, tmp_path / str(mu), 3)

    near, far = run(1e3), run(1e-30)
    distances = [
        sum(e["distance"] for e in journal.events if e["event"] == "train")
        for journal in (near, far)
    ]
    assert distances[0] < distances[1]
    average = run(0.0, strategy="fedjudge-base")
    for name, value in average.adapters[1].items():
        torch.testing.assert_close(far.adapters[1][name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"strategy": "fedprox"}, "needs fedprox.mu, such as 0.01"),
        ({"strategy": "fl-glm", "fedprox.mu": 0.1}, 'not for strategy = "fl-glm"'),
        ({"strategy": "fedjudge-cl", "fedprox.mu": 0.1}, 'not for strategy = "fedjudge-cl"'),
        ({"strategy": "fedprox", "fedprox.mu": -1.0}, "fedprox.mu = -1.0"),
    ],
)
def test_what_would_have_no_effect_is_refused(values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run_config(values)
