"""A malicious institution's ``flwr-clientapp``: two of its replies fill the reader's memory.

The replies are authenticated, with the key that the instruction contains.
"""

import sys
from functools import partial

from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from federation import packed_content
from federation.authentication import SignedInstruction, open_reply
from federation.messages import ARRAYS, CONFIG

# Size in memory; the stored objects have 5 MiB or 7 MiB.
BYTES = 2**31
_NAMES = 64


def repeated_piece() -> ArrayRecord:
    """Return an array that consists of one piece, repeated."""
    return ArrayRecord({"0": _zeros(BYTES)})


def many_names() -> ArrayRecord:
    """Return one array under many names, which decryption copies for each name."""
    array = _zeros(BYTES // _NAMES)
    return ArrayRecord({str(number): array for number in range(_NAMES)})


def _zeros(size: int) -> Array:
    return Array("uint8", (size,), "numpy.ndarray", bytes(size))


_REPLIES = {1: repeated_piece, 2: many_names}


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """Answer a message as the app does, or with a reply that is too large."""
    instruction = SignedInstruction.of(message.content)
    assert instruction is not None
    reply = app(message, context)
    spoiled = _REPLIES.get(message.content[CONFIG]["round"])
    if message.metadata.message_type == MessageType.TRAIN and spoiled:
        open_reply(reply, instruction.statement)
        reply.content[ARRAYS] = spoiled()
        # Leave the pieces unencrypted; encrypted, they would differ from each other.
        packed_content._applied = lambda key, record: record
        instruction.authenticate(reply)
    return reply


def main() -> None:
    """Run Flower's program with a different app."""
    load = run_clientapp.get_load_client_app_fn

    def load_other(**options):
        return lambda *names: partial(answer, load(**options)(*names))

    run_clientapp.get_load_client_app_fn = load_other
    sys.exit(flwr_clientapp())


if __name__ == "__main__":
    main()
