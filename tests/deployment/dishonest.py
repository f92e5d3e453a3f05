"""Programs of a run with masked sums that attack it, or that end at a certain step.

``flwr-serverapp`` belongs to a malicious coordinator: its instructions are signed with the
coordinator's key, and it keeps a transcript of the uploads. ``flwr-clientapp`` belongs to an honest
institution. Both read what to do from a file, once, so that a later run is undisturbed:

    python dishonest.py PROGRAM FILE [OPTIONS]
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.superlink.cli import flwr_serverapp
from flwr.supernode.cli import flwr_clientapp

from client_app import fedjudge, handlers, masked_sums
from client_app.audit import AuditLog
from federation.authentication import Signer
from federation.flower_internals import HttpGrid
from federation.messages import ARRAYS
from federation.sums.announcement import GROUP, Announcement, announcements_of, group_record
from server_app.results import Results
from strategies.masked_sums import MaskedSums

VICTIM, PEER = "court", "hospital"
TRANSCRIPT = "transcript"
# Steps of an institution and of the coordinator at which their program can end.
CLIENT_STEPS = ("before training", "before storing", "before the audit line", "before sending")
SERVER_STEPS = ("before opening", "before the checkpoint", "after the checkpoint")


def end_at(step: str, file: Path) -> Callable[..., None]:
    """Return a function that ends this process if ``file`` names the step."""

    def end(*_: Any, **__: Any) -> None:
        if file.exists() and file.read_text() == step:
            file.unlink()
            os._exit(9)

    return end


def is_train(message: Message) -> bool:
    """Return whether a message asks for training."""
    return message.metadata.message_type == "train"


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Make a function perform an action first."""
    original = getattr(owner, name)

    @wraps(original)
    def changed(*arguments: Any, **keywords: Any) -> Any:
        action(*arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, changed)


def after(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Make a function perform an action afterwards."""
    original = getattr(owner, name)

    @wraps(original)
    def changed(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        action(*arguments, **keywords)
        return result

    setattr(owner, name, changed)


def swap_key(announcements: list[Announcement]) -> list[Announcement]:
    """Replace the peer's key of the run with a key of the coordinator."""
    own = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    return [
        Announcement(
            each.statement.model_copy(update={"key": own}).model_dump_json().encode(),
            each.signature,
        )
        if each.statement.name == PEER
        else each
        for each in announcements
    ]


def leave_out(announcements: list[Announcement]) -> list[Announcement]:
    """Leave out the peer, whose adapter would be the difference to the sum of all."""
    return [each for each in announcements if each.statement.name != PEER]


def attacked(content: RecordDict, attack: str) -> RecordDict:
    """Return an attack's version of a train message's content."""
    announcements = announcements_of(content[GROUP])
    changed = RecordDict(dict(content))
    if attack == "adapter":
        other = {n: Array(a.numpy() + np.float32(1e-3)) for n, a in content[ARRAYS].items()}
        changed[ARRAYS] = ArrayRecord(other)
    if attack == "key":
        changed[GROUP] = group_record(swap_key(announcements))
    if attack == "without":
        changed[GROUP] = group_record(leave_out(announcements))
    return changed


class Coordinator:
    """A coordinator that attacks the institution that it asks first in each round."""

    def __init__(self, file: Path) -> None:
        self.attack = file.read_text() if file.exists() else ""
        self.folder = file.with_name(TRANSCRIPT)
        self.extra: list[tuple[Message, Callable[[], Any]]] = []
        self.victims: set[int] = set()

    def signing(self) -> Callable[..., Any]:
        """Return a method that signs a message, or an attack's version of it."""
        original = Signer.sign

        def sign(signer: Signer, message: Message, shared: Any) -> Any:
            about = message.metadata
            if is_train(message) and not self.victims:
                self.victims.add(about.dst_node_id)
                if self.attack == "twice":
                    again = Message(message.content, about.dst_node_id, "train", ttl=about.ttl)
                    self.extra.append((again, partial(original, signer, again, shared)))
                else:
                    message.content = attacked(message.content, self.attack)
            return original(signer, message, shared)

        return sign

    def push(self, grid: HttpGrid, _: Any) -> None:
        """Also send the repeated message, to which nobody waits for a reply."""
        if self.extra:
            message, sign = self.extra.pop()
            sign()
            grid.push_messages([message])

    def keep(self, _: MaskedSums, replies: Any, reference: Any) -> None:
        """Copy the uploads of a round."""
        if reference is not None:
            self.folder.mkdir(exist_ok=True)
            for name in replies.metrics:
                shutil.copy(replies.file(name), self.folder / f"{name}.safetensors")


def main() -> None:
    """Run Flower's program with other functions in it."""
    program, file = sys.argv[1], Path(sys.argv[2])
    sys.argv[:3] = [program]
    if program == "flwr-serverapp":
        coordinator = Coordinator(file)
        Signer.sign = coordinator.signing()  # type: ignore[method-assign]
        after(HttpGrid, "push_messages", coordinator.push)
        before(MaskedSums, "open", coordinator.keep)
        before(MaskedSums, "open", end_at("before opening", file))
        before(Results, "checkpoint", end_at("before the checkpoint", file))
        after(Results, "checkpoint", end_at("after the checkpoint", file))
        sys.exit(flwr_serverapp())
    before(fedjudge, "train", end_at("before training", file))
    stored = end_at("before storing", file)
    before(masked_sums, "save_file", lambda _, to: stored() if "-train-" in str(to) else None)
    end = end_at("before the audit line", file)
    before(handlers, "describe_reply", lambda asked, _: end() if is_train(asked) else None)
    last = end_at("before sending", file)

    def end_after_reply(_: AuditLog, event: dict[str, Any], **__: Any) -> None:
        if (event["event"], event["kind"]) == ("reply", "train"):
            last()

    after(AuditLog, "append", end_after_reply)
    sys.exit(flwr_clientapp())


if __name__ == "__main__":
    main()
