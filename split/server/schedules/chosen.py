"""Which schedule a run's clients share the body by."""

from collections.abc import Callable, Mapping

from finetuning.adapters.adapter import State
from finetuning.settings import SplitSettings
from split.model.cut import PartyName
from split.server.branch import Branch
from split.server.compute import ComputeThread
from split.server.schedules.client_batch import ClientBatch
from split.server.schedules.hierarchical import Hierarchical
from split.server.schedules.schedule import Schedule
from split.server.schedules.serial import Serial


def chosen_schedule(
    split: SplitSettings,
    make_branch: Callable[[], Branch],
    compute: ComputeThread,
    state: Mapping[PartyName, State],
    minimum: int,
) -> Schedule:
    """Give what ``split.schedule`` names.

    Args:
        split: the schedule and its limits.
        make_branch: makes a set of the body's adapters with an optimizer.
        compute: does what touches the adapters.
        state: the whole model's adapters to begin with, by party.
        minimum: clients without whom a round is not worth its while.

    """
    if split.schedule == "serial":
        return Serial(make_branch())
    if split.schedule == "client-batch":
        return ClientBatch(
            make_branch(),
            compute,
            split.activation_budget,
            minimum,
            split.join_timeout,
            split.gather_timeout,
        )
    return Hierarchical(
        make_branch,
        compute,
        state["body"],
        state["head"] | state["tail"],
        minimum,
        split.average_every,
        split.join_timeout,
    )
