"""Settings of masked sums."""

import math
from typing import Self

from pydantic import Field, field_validator, model_validator

from federation.setting_errors import require_absolute
from finetuning.settings import Section

MIN_GROUP = 3  # the sum of two clients' updates would tell each the other's


class SumSettings(Section):
    """How a run sums adapters that only their clients know."""

    enabled: bool = Field(
        False,
        description="Whether the coordinator receives [masked sums](masked-sums.md) of groups of "
        "clients, and no adapter, importance or loss of a single client. Not for `fl-glm`.",
    )
    members: str = Field(
        "",
        description="Absolute path, on the server, of the signed list of groups, members.json. "
        "Required in deployments; in simulation, groups are formed by name.",
    )
    bound: float = Field(
        1.0,
        description="Maximum change of a weight in a round, a power of two from 2⁻⁶ to 2⁴; larger "
        "changes are cut off. The sum's precision is 2⁻³⁰ of it.",
    )
    max_distance: float = Field(
        0.0,
        ge=0,
        description="Maximum norm of a client's update, to which the client itself shortens it; "
        "0: none. The coordinator can't limit single clients.",
    )

    @field_validator("members")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        return require_absolute(value)

    @field_validator("bound")
    @classmethod
    def _is_fine(cls, value: float) -> float:
        # With a coarse step, all updates but a single large one would round to 0.
        if not 2**-6 <= value <= 2**4 or math.frexp(value)[0] != 0.5:
            raise ValueError("must be a power of two from 0.015625 (2⁻⁶) to 16 (2⁴)")
        return value

    @model_validator(mode="after")
    def _has_no_unused_setting(self) -> Self:
        if not self.enabled and (self.members, self.bound, self.max_distance) != ("", 1.0, 0.0):
            raise ValueError("sums.members, sums.bound and sums.max-distance need sums.enabled")
        return self
