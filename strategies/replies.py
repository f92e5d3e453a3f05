"""Valid replies of one phase, with arrays on disk to limit memory use."""

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.common import log
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from federation.messages import (
    ARRAYS,
    SIZE,
    Answer,
    answer_events,
    answers_of,
    from_arrays,
    metrics_of,
    release_of,
    withheld_of,
)
from finetuning.adapters.adapter import State
from finetuning.errors import printable
from finetuning.files import filling
from strategies.journal import Journal, evaluation_events, underscored
from strategies.participants import TooFewClientsError
from strategies.refusals import reason_to_refuse, says_not_finite
from strategies.registration import Participant


class NotFiniteError(RuntimeError):
    """Most clients report that the global adapter is unusable."""


class Replies:
    """Context manager for valid replies, whose arrays are stored in files and deleted on exit.

    Files that a killed run left behind in the same folder are deleted on entry.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Keyed by client; ``left_out`` and ``withheld`` contain reasons.
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.left_out: dict[str, str] = {}
        self.withheld: dict[str, str] = {}
        self.releases: dict[str, dict[str, str]] = {}  # verdicts of the clients' leak tests
        # Clients that reported a loss or gradient that isn't finite.
        self.not_finite: list[str] = []

    def add(
        self,
        reply: Message,
        sender: Participant,
        base: str,
        reference: ArrayRecord | None,
        minimum: float,
        answers: int,
    ) -> str | None:
        """Add a client's reply, and return None; or return why the client is left out.

        The parameters are those of ``reason_to_refuse``. Arrays that were not requested are
        ignored. Raise ``DiskFullError`` if the arrays don't fit on the disk.
        """
        name, examples = sender.name, sender.examples
        reason = reason_to_refuse(reply, name, examples, base, reference, minimum, answers)
        if reason is not None:
            reason = self.left_out[name] = printable(reason)
            if says_not_finite(reply, reason):
                self.not_finite.append(name)
            return reason
        self.metrics[name] = dict(metrics_of(reply))
        self.answers[name] = answers_of(reply)
        if release := release_of(reply):
            self.releases[name] = release
        if withheld := withheld_of(reply):
            self.withheld[name] = withheld
            log(WARNING, "%s: %s", name, withheld)
        if reference is not None:
            state = from_arrays(reply.content.array_records[ARRAYS])
            with filling(self._folder.parent):
                save_file(state, self.file(name), metadata={"format": "pt"})
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """The clients' numbers of training rows, by name."""
        return {name: metrics[SIZE] for name, metrics in self.metrics.items()}

    def leave_out(self, name: str, reason: str) -> None:
        """Leave out a client whose reply was already added."""
        del self.metrics[name], self.answers[name]
        self.withheld.pop(name, None)
        self.left_out[name] = reason
        self.sort()

    def state(self, name: str) -> State:
        """Return a copy of a reply's arrays."""
        return dict(load_file(self.file(name)))

    def tensors(self) -> Iterator[tuple[str, State]]:
        """Yield the name of each array, and the array's values from each reply, keyed by client."""
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(safe_open(self.file(name), framework="pt"))
                for name in self.metrics
            }
            keys = next(iter(files.values())).keys() if files else []
            for key in keys:
                yield key, {name: file.get_tensor(key) for name, file in files.items()}

    def file(self, name: str) -> Path:
        """Return the file with a reply's arrays; the file may be moved once it has been read."""
        return self._folder / f"{name}.safetensors"

    def sort(self) -> None:
        """Sort replies by name, so that sums don't depend on the order of arrival."""
        self.metrics = dict(sorted(self.metrics.items()))
        self.left_out = dict(sorted(self.left_out.items()))

    def require_finite(self, journal: Journal, adapter_round: int, asked: Collection[str]) -> None:
        """Raise ``NotFiniteError`` if most clients report a global adapter as unusable.

        The adapter's checkpoint is then deleted if an earlier checkpoint exists. A majority of the
        clients ``asked`` is required, so that a minority can't reject an adapter. Valid replies of
        a client that withholds metrics never report an unusable adapter.
        """
        if 2 * len(self.not_finite) <= len(asked):
            return
        journal.discard(adapter_round)
        raise NotFiniteError(
            f"the global adapter after round {adapter_round} is unusable: losses or gradients are "
            f"not finite numbers at {', '.join(sorted(self.not_finite))}. Resume the run without "
            "the clients that were scaled down or left out (see metrics.jsonl), or start a new run "
            "with a lower train.learning-rate"
        )

    def require_enough(self, phase: str, minimum: int) -> None:
        """Raise ``TooFewClientsError`` if there are fewer than ``minimum`` valid replies."""
        valid = len(self.metrics)
        if valid < minimum:
            lines = "".join(f"\n  {name}: {reason}" for name, reason in self.left_out.items())
            raise TooFewClientsError(
                f"{phase}: {valid} valid replies, but min-nodes = {minimum} are required; left out:"
                f"{lines or ' nobody'}"
            )

    def record_training(self, journal: Journal, server_round: int) -> None:
        """Record each client's training metrics."""
        for name, metrics in self.metrics.items():
            own = {underscored(key): value for key, value in metrics.items() if key != SIZE}
            event = {"event": "train", "round": server_round, "client": name}
            if reason := self.withheld.get(name):
                event["withheld"] = reason
            journal.record({**own, **event, "examples": metrics[SIZE]})

    def record_evaluation(self, journal: Journal, server_round: int) -> None:
        """Record each client's metrics and answers, by model."""
        for name, metrics in self.metrics.items():
            about = {"round": server_round, "client": name}
            for event in evaluation_events(metrics):
                journal.record({**event, "event": "evaluate", **about})
            for event in answer_events(self.answers[name]):
                journal.record({**event, **about})
            if release := self.releases.get(name):
                level = WARNING if release["verdict"] == "refused" else INFO
                log(level, "%s: its leak test of the global adapter: %s", name, release["verdict"])
                journal.record({"event": "release", **about, **release})

    def __enter__(self) -> "Replies":
        shutil.rmtree(self._folder, ignore_errors=True)
        with filling(self._folder.parent):
            self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
