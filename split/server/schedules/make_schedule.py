"""Create the schedule that the run's configuration names."""

from collections.abc import Callable, Mapping

from finetuning.adapters.adapter import State
from split.model.partition import PartyName
from split.server.body_adapters import BodyAdapters
from split.server.compute import ComputeThread
from split.server.schedules.client_batch import ClientBatch
from split.server.schedules.hierarchical import Hierarchical
from split.server.schedules.serial import Serial
from split.settings import SplitSettings

# How clients share the body. All schedules have the same methods.
Schedule = Serial | ClientBatch | Hierarchical


def make_schedule(
    split: SplitSettings,
    make_adapters: Callable[[], BodyAdapters],
    compute: ComputeThread,
    state: Mapping[PartyName, State],
    minimum: int,
) -> Schedule:
    """Return a new schedule of the kind in ``split.schedule``.

    ``make_adapters`` returns a new set of body adapters with an optimizer. If clients train
    together, a round needs at least ``minimum`` of them.
    """
    if split.schedule == "serial":
        return Serial(make_adapters())
    if split.schedule == "client-batch":
        return ClientBatch(adapters=make_adapters(), compute=compute, split=split, minimum=minimum)
    return Hierarchical(
        make_adapters=make_adapters,
        compute=compute,
        state=state["body"],
        client_adapters=state["head"] | state["tail"],
        split=split,
        minimum=minimum,
    )
