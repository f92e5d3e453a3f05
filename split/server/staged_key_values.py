"""The keys and values of the blocks at several stages during generation."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch

from split.protocol.frames import Padding
from split.server.stage_client import StageClient


class StagedKeyValues:
    """The `KeyValues` of the blocks at several stages."""

    _numbers = itertools.count()

    def __init__(
        self, stages: Sequence[StageClient], name: str, padding: Padding, columns: int
    ) -> None:
        self._stages, self._name, self._number = stages, name, next(self._numbers)
        with ExitStack() as on_failure:
            on_failure.callback(self.free)
            for stage in stages:
                stage.begin_texts(self._number, name, padding, columns)
            on_failure.pop_all()

    def extend(self, hidden: torch.Tensor, drop: int = 0) -> torch.Tensor:
        """Compute the blocks for the prompts or next tokens; see `KeyValues.extend`."""
        fields = {"number": self._number, "name": self._name, "drop": drop}
        for stage in self._stages:
            hidden = stage.call("extend", {"hidden": hidden}, **fields)["hidden"]
        return hidden

    def repeat(self, times: int) -> None:
        """Repeat each row; see `KeyValues.repeat`."""
        for stage in self._stages:
            stage.call("repeat", number=self._number, times=times)

    def free(self) -> None:
        """Free the keys and values at all stages."""
        for stage in self._stages:
            with suppress(ConnectionError):  # of a lost stage, nothing is left
                stage.call("free", number=self._number)
