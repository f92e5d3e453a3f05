"""The status of a run, stored in the file ``status.json`` in its folder."""

from typing import Literal

from pydantic import BaseModel

Phase = Literal["registration", "training", "evaluation", "completed", "failed"]


class LaneStatus(BaseModel):
    """A client's progress in a round of split learning."""

    client: str
    steps: int  # number of completed optimizer steps
    planned: int  # number of optimizer steps in the client's round
    tokens: int  # number of padded tokens processed by forward passes


class RunStatus(BaseModel):
    """The status of a run. Times are Unix times in seconds; clients are identified by name."""

    phase: Phase = "registration"
    round: int = 0  # counted from 1; 0 before the first round
    rounds: int = 0
    since: float = 0.0  # time at which the phase began
    until: float = 0.0  # deadline after which clients that haven't replied are left out
    updated: float = 0.0  # time when this status was written
    asked: list[str] = []  # clients to which a message was sent in this phase
    replied: list[str] = []  # clients that sent a valid reply
    left_out: dict[str, str] = {}  # reasons for leaving out clients in this phase
    lanes: list[LaneStatus] = []  # progress of the clients with open lanes
    problem: str = ""  # reason why the run failed
