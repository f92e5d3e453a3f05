"""TensorBoard output of a run, written if TensorBoard is installed."""

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class TensorBoardFile:
    """Writes numbers for TensorBoard; does nothing without the extra ``tensorboard``.

    The output is optional: ``metrics.jsonl`` and the report contain the same numbers.
    """

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        if find_spec("tensorboard") is not None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, keyed by name."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def flush(self) -> None:
        """Write buffered values."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write buffered values, and close the file."""
        if self._writer is not None:
            self._writer.close()
