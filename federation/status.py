"""The status of a run, stored in the file ``status.json`` in its folder."""

from typing import Literal

from pydantic import BaseModel, Field

Phase = Literal["registration", "training", "evaluation", "completed", "failed"]


class LaneStatus(BaseModel):
    """A client's progress in a round of split learning.

    Attributes:
        client: Name of the client.
        steps: Number of completed optimizer steps.
        planned: Number of optimizer steps in the client's round.
        tokens: Number of padded tokens processed by forward passes.

    """

    client: str
    steps: int
    planned: int
    tokens: int


class RunStatus(BaseModel):
    """The status of a run. Times are in seconds since the epoch.

    Attributes:
        phase: Current phase; ``completed`` or ``failed`` after the run has ended.
        round: Number of the round, from 1; 0 before the first round.
        rounds: Number of rounds of the run.
        since: Start time of the phase.
        until: Deadline after which clients that haven't replied are left out.
        updated: Time at which this status was written.
        asked: Clients that received a message in this phase.
        replied: Clients that sent a valid reply.
        left_out: Reasons for leaving out clients in this phase, by client name.
        lanes: Progress of the clients with open lanes.
        problem: Reason why the run failed; empty otherwise.

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
