"""What the server does with the mean of the clients' adapters (Reddi et al., 2021).

An update is always applied to the adapter and the state from before the round, so that a mean that
late replies repeat is still a single step. To add one, write a class with ``apply``, and use it in
``server_update``.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from federation.server_settings import ServerSettings
from finetuning.adapters.adapter import State

_TAU = 1e-3  # the degree of adaptivity, as in Reddi et al. and in Flower
_STEP = "step"  # name of the number of steps in an update's state


class ServerUpdate(Protocol):
    """Computes the next global adapter from the mean of the clients' adapters."""

    def apply(self, previous: State, mean: State, state: State) -> tuple[State, State]:
        """Return the global adapter after a round, and the update's next state.

        ``previous`` is the round's initial adapter, and ``mean`` has the same names and shapes.
        ``state`` is what the call for the round before returned; empty in the first round.
        """


class Mean:
    """The mean is the global adapter (FedJudge Eq. 2)."""

    def apply(self, previous: State, mean: State, state: State) -> tuple[State, State]:
        """Return the mean itself."""
        return mean, {}


@dataclass(frozen=True)
class FedAvgM:
    """Gradient descent with momentum on x − mean (Hsu et al., 2019).

    With v = β₁ · v + (x − mean), the global adapter is x − η · v.
    """

    learning_rate: float
    beta_1: float

    def apply(self, previous: State, mean: State, state: State) -> tuple[State, State]:
        """Return x − η · v, and v."""
        velocity = {
            name: state.get(name, torch.zeros_like(x)) * self.beta_1 + (x - mean[name])
            for name, x in previous.items()
        }
        return {n: x - self.learning_rate * velocity[n] for n, x in previous.items()}, velocity


@dataclass(frozen=True)
class FedAdam:
    """FedAdam (Reddi et al., 2021, algorithm 2), with the bias correction of Adam, as in Flower.

    With Δ = mean − x, m = β₁ · m + (1 − β₁) · Δ and v = β₂ · v + (1 − β₂) · Δ², the global adapter
    is x + η · m / (√v + τ).
    """

    learning_rate: float
    beta_1: float
    beta_2: float

    def apply(self, previous: State, mean: State, state: State) -> tuple[State, State]:
        """Return the global adapter, and m, v and the number of steps."""
        step = state.get(_STEP, torch.zeros((), dtype=torch.float64)) + 1
        updated: State = {}
        after: State = {_STEP: step}
        rate = self.rate(float(step))
        for name, x in previous.items():
            change, zeros = mean[name] - x, torch.zeros_like(x)
            momentum = self.beta_1 * state.get(f"m.{name}", zeros) + (1 - self.beta_1) * change
            moment = self.second_moment(state.get(f"v.{name}", zeros), change.square())
            after |= {f"m.{name}": momentum, f"v.{name}": moment}
            updated[name] = x + rate * momentum / (moment.sqrt() + _TAU)
        return updated, after

    def rate(self, step: float) -> float:
        """Return the learning rate with Adam's bias correction; Flower counts from step 2."""
        corrected: float = (1 - self.beta_2 ** (step + 1)) ** 0.5 / (1 - self.beta_1 ** (step + 1))
        return self.learning_rate * corrected

    def second_moment(self, moment: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Return the next v, given v and Δ²."""
        return self.beta_2 * moment + (1 - self.beta_2) * square


class FedYogi(FedAdam):
    """FedYogi (Reddi et al., 2021, algorithm 2): v − (1 − β₂) · Δ² · sign(v − Δ²) is the next v."""

    def rate(self, step: float) -> float:
        """Return the learning rate, which isn't corrected."""
        return self.learning_rate

    def second_moment(self, moment: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Return the next v, given v and Δ²."""
        return moment - (1 - self.beta_2) * square * (moment - square).sign()


def server_update(settings: ServerSettings) -> ServerUpdate:
    """Return the update that ``server.update`` names."""
    rate, beta_1, beta_2 = settings.learning_rate, settings.beta_1, settings.beta_2
    updates: dict[str, ServerUpdate] = {
        "mean": Mean(),
        "momentum": FedAvgM(rate, beta_1),
        "adam": FedAdam(rate, beta_1, beta_2),
        "yogi": FedYogi(rate, beta_1, beta_2),
    }
    return updates[settings.update]
