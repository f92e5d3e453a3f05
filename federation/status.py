"""Current phase of a run: the file ``status.json`` in its folder."""

from typing import Literal

from pydantic import BaseModel, Field

Phase = Literal["registration", "training", "evaluation", "completed", "failed"]


class LaneStatus(BaseModel):
    """A client's progress in a round of split learning.

    Attributes:
        client: Name of the client.
        steps: Finished optimizer steps.
        planned: Optimizer steps of the client's round.
        tokens: Padded tokens whose forward pass was computed.

    """

    client: str
    steps: int
    planned: int
    tokens: int


class RunStatus(BaseModel):
    """The current phase of a run. Times are seconds since the epoch.

    Attributes:
        phase: Current phase; a run that has ended is ``completed`` or ``failed``.
        round: Number of the round, from 1; 0 before the first round.
        rounds: Number of rounds of the run.
        since: Start of the phase.
        until: Time at which clients that haven't replied are left out.
        updated: When this was written.
        asked: Clients that work in this phase.
        replied: Those of them whose replies are valid.
        left_out: Reasons for leaving clients out in this phase, by name.
        lanes: Progress of the clients with open lanes.
        problem: Why the run has failed.

    """

    phase: Phase = "registration"
    round: int = 0
    rounds: int = 0
    since: float = 0.0
    until: float = 0.0
    updated: float = 0.0
    asked: list[str] = Field(default_factory=list)
    replied: list[str] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    lanes: list[LaneStatus] = Field(default_factory=list)
    problem: str = ""
