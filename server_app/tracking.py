"""Send a run's numbers to experiment trackers, with ``accelerate.tracking``.

Trackers receive the numbers of ``metrics.jsonl``, by client, and the run config without paths.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from federation.run_config import ConfigError, RunConfig
from finetuning.adapters.model_card import LOCAL_SETTINGS
from finetuning.model.names import public_name

_PROJECT = "chambers"
# Each tracker's argument for the name of a run in a project, and further arguments. By default, W&B
# and trackio would also send the run's log, and facts about this machine.
_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlflow": ("run_name", {}),
    "trackio": ("name", {"auto_log_gpu": False, "auto_log_cpu": False}),
    "wandb": (
        "name",
        {"settings": {"console": "off", "disable_git": True, "x_disable_stats": True}},
    ),
}
_Event = Mapping[str, Any]


class Tracking:
    """The trackers of a run; ``report-to`` names them, by default TensorBoard if it is installed.

    A value's position is the number of training steps: of each round, the most that a client took,
    added up. After an error, such as a lost connection, a tracker isn't used any more. In
    TensorBoard, clients share charts; elsewhere, a value's name ends with the client's. Raise
    ``ConfigError`` if a tracker isn't installed.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._names = list(filter(None, (name.strip() for name in config.report_to.split(","))))
        for name in self._names:
            if find_spec(name) is None:
                raise ConfigError(
                    f'report-to = "{config.report_to}": {name} isn\'t installed; install it at the '
                    f"coordinator (pip install {name})"
                )
        if not self._names and find_spec("tensorboard"):
            self._names = ["tensorboard"]
        self._directory = directory
        self._settings = {k: v for k, v in config.flat().items() if k not in LOCAL_SETTINGS}
        self._settings |= {"model.name": public_name(config.model.name)}
        self._trackers: dict[tuple[str, str], Any] = {}
        self._trained: list[_Event] = []
        self._steps = {0: 0}  # by round: number of steps at its end

    def resume(self, events: Iterable[_Event]) -> None:
        """Count the steps of events that were recorded before."""
        self._count([event for event in events if event["event"] == "train"])

    def record(self, event: _Event) -> None:
        """Send the numbers of a ``train`` or ``evaluate`` event.

        A round's ``train`` events are sent together, since the longest training counts.
        """
        if event["event"] == "train":
            self._trained.append(event)
            return
        self._send_trained()
        if event["event"] == "evaluate":
            self._send(event, f"evaluate/{event['model']}")

    def close(self) -> None:
        """Send what has been recorded, and end all trackers."""
        self._send_trained()
        for (name, _), tracker in self._trackers.items():
            with self._dropping_after_errors(name):
                tracker.finish()

    def _send_trained(self) -> None:
        trained, self._trained = self._trained, []
        self._count(trained)
        for event in trained:
            self._send(event, "train")

    def _count(self, trained: Sequence[_Event]) -> None:
        for event in trained:
            number = event["round"]
            steps = self._steps.get(number - 1, 0) + event.get("steps", 0)
            self._steps[number] = max(self._steps.get(number, 0), steps)

    def _send(self, event: _Event, prefix: str) -> None:
        numbers = {k: v for k, v in event.items() if isinstance(v, int | float) and k != "round"}
        client, step = event["client"], self._steps.get(event["round"], 0)
        for name in list(self._names):
            run, end = (client, "") if name == "tensorboard" else ("", f"/{client}")
            values = {f"{prefix}/{key}{end}": value for key, value in numbers.items()}
            with self._dropping_after_errors(name):
                self._tracker(name, run).log(values, step=step)

    def _tracker(self, name: str, client: str) -> Any:
        """Return a tracker, and start it first if it is new."""
        if (name, client) not in self._trackers:
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            PartialState(cpu=True)  # without it, trackers and accelerate's log raise errors
            kind = LOGGER_TYPE_TO_CLASS[name]
            if name == "tensorboard":
                tracker = kind(client, self._directory / "tensorboard")
            else:
                key, others = _ARGUMENTS[name]
                tracker = kind(_PROJECT, **{key: self._directory.name}, **others)
            tracker.start()
            if name != "tensorboard":
                tracker.store_init_configuration(self._settings)
            self._trackers[name, client] = tracker
        return self._trackers[name, client]

    @contextmanager
    def _dropping_after_errors(self, name: str) -> Iterator[None]:
        """Log an error in the context, and stop using the tracker."""
        try:
            yield
        except Exception as error:  # a tracker's failure must not end the run
            log(WARNING, "%s is not used any more: %s: %s", name, type(error).__name__, error)
            self._names = [other for other in self._names if other != name]
