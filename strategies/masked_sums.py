"""The coordinator's part of masked sums: complete groups, their checks, and their means."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common import log
from safetensors.numpy import load_file

from federation.messages import Instruction
from federation.run_config import RunConfig
from federation.sums.announcement import Group
from federation.sums.masks import CHECK, decode_update, decode_wide, sum_arrays
from federation.sums.members import SumError
from federation.sums.uploads import METRICS, decode_metrics, expected_arrays
from finetuning.adapters.adapter import State
from finetuning.aggregation.robust_aggregation import counted_sizes
from strategies.journal import Journal, evaluation_events
from strategies.replies import Replies


@dataclass
class GroupMeans:
    """The weighted means of complete groups, by the group's name."""

    members: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # sums of the members' weights
    states: dict[str, State] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, State]]:
        """Yield the name of each tensor, and the tensor of each group, keyed by group."""
        for key in next(iter(self.states.values()), {}):
            yield key, {name: state[key] for name, state in self.states.items() if key in state}


class MaskedSums:
    """Opens the sums of the groups that were asked last; ``groups`` are keyed by member."""

    def __init__(self, config: RunConfig, groups: Mapping[str, Group]) -> None:
        self._config = config
        self._groups = groups

    def expected(
        self, name: str, reference: ArrayRecord | None, evaluation: Instruction | None
    ) -> ArrayRecord:
        """Return the arrays of a valid upload, without values.

        ``reference`` has the arrays of the adapter or of J, if they are requested. ``evaluation``
        is the instruction of evaluate messages; None for train messages.
        """
        group = self._groups[name]
        shapes = {key: list(array.shape) for key, array in (reference or {}).items()}
        if evaluation is None:
            return expected_arrays(shapes, "uint32", with_metrics=False)
        with_metrics = evaluation.losses and group.evaluates
        return expected_arrays(shapes if group.importance else {}, "uint64", with_metrics)

    def open(self, replies: Replies, reference: State | None) -> GroupMeans:
        """Return the means of groups whose members have all replied; leave out other clients.

        ``reference`` is the adapter from which the clients have trained; None for evaluations.
        """
        means = GroupMeans()
        for group in {id(group): group for group in self._groups.values()}.values():
            names = list(group.announcements)
            present = [name for name in names if name in replies.metrics]
            missing = ", ".join(name for name in names if name not in present)
            problem = f"its group is incomplete: {missing} failed" if missing else None
            if not missing:
                try:
                    self._add(means, group, replies, reference)
                except SumError as error:
                    problem = f"the sum of its group ({', '.join(names)}) can't be used: {error}"
            for name in present if problem else ():
                replies.leave_out(name, problem or "")
                log(WARNING, "%s is left out: %s", name, problem)
        return means

    def _add(
        self, means: GroupMeans, group: Group, replies: Replies, reference: State | None
    ) -> None:
        names = list(group.announcements)
        weight = sum(counted_sizes(group.rows, self._config.max_share).values())
        totals = sum_arrays(load_file(replies.file(name)) for name in names)
        if not np.all(totals[CHECK] == weight):
            raise SumError("its members have not received the same, or one has sent a wrong upload")
        state = {}
        for name, total in totals.items():
            if name in (CHECK, METRICS):
                continue
            if reference is None:
                state[name] = torch.from_numpy(decode_wide(total, len(names))).float()
            else:
                change = torch.from_numpy(decode_update(total, len(names), self._config.sums.bound))
                state[name] = (reference[name].double() + change).float()
        title = f"mean of {', '.join(names)}"
        means.metrics[title] = decode_metrics(totals, len(names))
        means.members[title] = names
        means.sizes[title], means.states[title] = weight, state
        log(INFO, "Opened the sum of %s", ", ".join(names))


def record_group_metrics(journal: Journal, server_round: int, means: GroupMeans) -> None:
    """Record the mean losses and scores of each group, by model."""
    for title, metrics in means.metrics.items():
        about = {"event": "evaluate", "round": server_round, "client": title}
        for event in evaluation_events(metrics):
            journal.record({**event, **about, "clients": means.members[title]})
