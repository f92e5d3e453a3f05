"""A client's state between messages, stored on its own disk.

Flower loses ``context.state`` when a SuperNode restarts, and silently drops states of 200 MB.
``<state-path>/<lineage>/<client>/round-0002/`` contains the personalised adapter and the optimizer
state after round 2. The last two rounds are kept, so that a run that lost its last round can resume
from the previous one. The last round whose adapter the server averaged is kept, too.
"""

import json
import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import platformdirs
from safetensors.torch import load_file, save_file

from finetuning.adapters.adapter import State
from finetuning.files import remove_unfinished, remove_whole, replacing

_KEPT_ROUNDS = 2


@dataclass(frozen=True)
class PrivateRound:
    """A differentially private round, whose secret key determines its rows and noise."""

    inputs: str  # digest of all else that determines the result, see ``unfinished_round``
    round: int
    id: str = field(default_factory=partial(secrets.token_hex, 16))
    key: str = field(default_factory=partial(secrets.token_hex, 32), repr=False)  # hexadecimal


class ClientState:
    """The state of a client in a run, stored by default in the user's state folder."""

    def __init__(self, state_path: str, lineage: str, client: str) -> None:
        root = Path(state_path or platformdirs.user_state_path("chambers")).expanduser()
        self.directory = root / lineage / client
        self.private_round_file = self.directory / "private-round.json"

    def private_round(self) -> PrivateRound | None:
        """Return the unfinished private round, if there is one."""
        try:
            return PrivateRound(**json.loads(self.private_round_file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def save(
        self, round_number: int, adapter: State, optimizer: State, counted: int | None = None
    ) -> None:
        """Save the adapter and the optimizer state after a round.

        Only the last two rounds remain, and ``counted``: the last round whose adapter the server
        averaged. If the disk is full, raise ``DiskFullError``; no partial files remain.
        """
        with replacing(self._round(round_number)) as aside:
            aside.mkdir(parents=True)
            save_file(adapter, aside / "adapter.safetensors")
            save_file(optimizer, aside / "optimizer.safetensors")
        # Count folders, not rounds: a round in which the client didn't take part has no folder.
        for old in sorted(self._rounds())[:-_KEPT_ROUNDS]:
            if old != counted:
                remove_whole(self._round(old))

    def forget_from(self, round_number: int) -> None:
        """Remove the state of this and later rounds, and unfinished files of killed processes."""
        remove_unfinished(self.directory)
        for number in self._rounds():
            if number >= round_number:
                remove_whole(self._round(number))

    def adapter(self, round_number: int) -> State | None:
        """Return the newest personalised adapter up to and including this round, or None."""
        return self._load(round_number, "adapter.safetensors")

    def optimizer(self, round_number: int) -> State | None:
        """Return the newest optimizer state up to and including this round, or None."""
        return self._load(round_number, "optimizer.safetensors")

    def _load(self, round_number: int, file: str) -> State | None:
        known = [number for number in self._rounds() if number <= round_number]
        return dict(load_file(self._round(max(known)) / file)) if known else None

    def _rounds(self) -> list[int]:
        # Other names, such as those of copies made by hand, are not rounds.
        names = (path.name.removeprefix("round-") for path in self.directory.glob("round-*"))
        return [int(name) for name in names if name.isdecimal()]

    def _round(self, number: int) -> Path:
        return self.directory / f"round-{number:04d}"
