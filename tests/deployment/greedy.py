"""A malicious institution's ``flwr-clientapp``: it claims many rows, and spoils its adapters.

Two of its replies fill the reader's memory, and the third replaces each weight. All replies are
authenticated, with the key that the instruction contains.
"""

import sys
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from federation import packed_content
from federation.authentication import SignedInstruction, open_reply
from federation.messages import ARRAYS, CONFIG, METRICS, SIZE

# Size in memory; the stored objects have 5 MiB or 7 MiB.
BYTES = 2**31
_NAMES = 64


def repeated_piece(_: ArrayRecord) -> ArrayRecord:
    """Return an array that consists of one piece, repeated."""
    return ArrayRecord({"0": _zeros(BYTES)})


def many_names(_: ArrayRecord) -> ArrayRecord:
    """Return one array under many names, which decryption copies for each name."""
    array = _zeros(BYTES // _NAMES)
    return ArrayRecord({str(number): array for number in range(_NAMES)})


def far_weights(trained: ArrayRecord) -> ArrayRecord:
    """Return an adapter of weights that no training reaches."""
    return ArrayRecord({n: Array(np.full_like(a.numpy(), 1e3)) for n, a in trained.items()})


def _zeros(size: int) -> Array:
    return Array("uint8", (size,), "numpy.ndarray", bytes(size))


_ADAPTERS = {1: repeated_piece, 2: many_names, 3: far_weights}


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """Answer a message as the app does, but claim a billion rows, and replace the adapter."""
    instruction = SignedInstruction.of(message.content)
    assert instruction is not None
    reply = app(message, context)
    open_reply(reply, instruction.statement)
    if SIZE in reply.content[METRICS]:
        reply.content[METRICS][SIZE] = 10**9
    if message.metadata.message_type == MessageType.TRAIN:
        number = message.content[CONFIG]["round"]
        reply.content[ARRAYS] = _ADAPTERS[number](reply.content[ARRAYS])
        if number != 3:
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
