"""The methods of training, by the names that ``strategy`` can have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

StrategyName = Literal["fedjudge-base", "fedjudge-cl", "fedprox", "fl-glm"]

_MU = "only FedProx has a proximal term"
_WHOLE = "each client would need the whole model, which FL-GLM splits"


@dataclass(frozen=True)
class Method:
    """What the other packages ask about a method, apart from the classes that run it."""

    description: str
    # Whether the clients have only the first and last blocks, and the server trains the others.
    is_split: bool = False
    # What clients add to the loss: the penalty of FedJudge (Eq. 3 and 4), or the term of FedProx.
    penalty: Literal["none", "continual", "proximal"] = "none"
    # Keys of settings that the method needs, with values that suit it.
    needs: Mapping[str, str] = field(default_factory=dict)
    # Keys of settings that must have their defaults, with the reasons.
    forbids: Mapping[str, str] = field(default_factory=dict)


METHODS: dict[StrategyName, Method] = {
    "fedjudge-base": Method("adapters are averaged (FedAvg)", forbids={"fedprox.mu": _MU}),
    "fedjudge-cl": Method(
        "also with the continual-learning penalty",
        penalty="continual",
        forbids={"fedprox.mu": _MU},
    ),
    "fedprox": Method(
        "with a proximal term instead", penalty="proximal", needs={"fedprox.mu": "0.01"}
    ),
    "fl-glm": Method(
        "the server runs the middle blocks",
        is_split=True,
        forbids={
            "fedprox.mu": _MU,
            "model.devices": f"{_WHOLE} (see split.body-devices)",
            "evaluate.alone": _WHOLE,
            "adapter.ranks": "the middle blocks have adapters of one rank",
            "adapter.trained": "the server trains both matrices of the middle blocks",
            "late-replies": "the server's part of a late update would be missing",
            "sums.enabled": "the block server sees each client's hidden states",
            "server.update": "the block server averages its own adapters",
        },
    ),
}
