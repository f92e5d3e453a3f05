"""What a client remembers between messages, on its own disk.

Not in Flower's ``context.state``: that is lost when a SuperNode restarts, and states of 200 MB are
lost without an error. ``<state-path>/<lineage>/<client>/round-0002/`` has the personalised adapter
and the optimizer after that round; two rounds are kept, so that a run that lost its last round can
go on from the one before.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors.torch import load_file, save_file

from finetuning.files import replacing

_KEPT_ROUNDS = 2
State = dict[str, torch.Tensor]


class ClientState:
    """The state of one client in one run.

    Args:
        state_path: ``state-path`` of the run config; empty means the user's state folder.
        lineage: of the run.
        client: the client's name.

    """

    def __init__(self, state_path: str, lineage: str, client: str) -> None:
        root = (
            Path(state_path).expanduser()
            if state_path
            else platformdirs.user_state_path("chambers")
        )
        self.directory = root / lineage / client

    def save(self, round_number: int, adapter: State, optimizer: State) -> None:
        """Save what a round of training left; rounds before the one before it are removed."""
        with replacing(self._round(round_number)) as aside:
            aside.mkdir(parents=True)
            save_file(adapter, aside / "adapter.safetensors")
            save_file(optimizer, aside / "optimizer.safetensors")
        for old in self._rounds():
            if old <= round_number - _KEPT_ROUNDS:
                shutil.rmtree(self._round(old))

    def describe(
        self, config: Mapping[str, Any], base: str, fingerprint: Mapping[str, str]
    ) -> None:
        """Write what the adapters here are of, in the same files as in a run's folder.

        Args:
            config: the run's, with dotted keys.
            base: where the base model was loaded from.
            fingerprint: of it, or of the parts that are held here.

        """
        for name, content in (
            ("config.json", dict(config)),
            ("base-model.json", {"loaded from": base, "digests": dict(fingerprint)}),
        ):
            with replacing(self.directory / name) as aside:
                aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def forget_from(self, round_number: int) -> None:
        """Remove what rounds from this one on left: a run that is resumed does them again."""
        for number in self._rounds():
            if number >= round_number:
                shutil.rmtree(self._round(number))

    def adapter(self, round_number: int) -> State | None:
        """Give the personalised adapter of the last round up to this one; None if there is none."""
        return self._load(round_number, "adapter.safetensors")

    def optimizer(self, round_number: int) -> State | None:
        """Give the optimizer's state of the last round up to this one; None if there is none."""
        return self._load(round_number, "optimizer.safetensors")

    def _load(self, round_number: int, file: str) -> State | None:
        known = [number for number in self._rounds() if number <= round_number]
        if not known:
            return None
        state: Mapping[str, torch.Tensor] = load_file(self._round(max(known)) / file)
        return dict(state)

    def _rounds(self) -> list[int]:
        return [
            int(folder.name.removeprefix("round-")) for folder in self.directory.glob("round-*")
        ]

    def _round(self, number: int) -> Path:
        return self.directory / f"round-{number:04d}"
