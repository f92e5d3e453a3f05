"""Time of signing and authenticating a Flower message, compared with Flower's own digests.

    python -m bench.signatures

The adapters are as in ``bench.aggregation``: LoRA of rank 16 on a model with hidden size 4,096.
The coordinator signs an instruction with the adapter for each client. One client verifies and opens
it, and authenticates a reply with the adapter, which the coordinator opens. For each message,
Flower's sender computes digests of all objects once. Times are medians over repetitions.
"""

import secrets
import time
from statistics import median

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from bench.aggregation import draw_adapter
from bench.harness import command, make_table, show
from federation.authentication import SignedInstruction, Signer, open_reply
from federation.messages import ARRAYS, CONFIG, State, answer, to_arrays
from federation.packed_content import EncryptedArrays

_REPETITIONS = 9
_BLOCKS, _CLIENTS = (1, 8, 32), 3


def _round_trip(key: Ed25519PrivateKey, state: State) -> dict[str, float]:
    """Return the seconds of each operation, for one message with an adapter."""
    nonce, arrays = ConfigRecord({"nonce": secrets.token_bytes(16)}), to_arrays(state)
    plain, *messages = (
        Message(RecordDict({CONFIG: nonce, ARRAYS: arrays}), 0, MessageType.TRAIN, ttl=60.0)
        for _ in range(_CLIENTS + 1)
    )
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    get_object_tree(plain)
    seconds = {"Flower's digests": lap()}
    signer, shared = Signer(key), EncryptedArrays()
    statements = [signer.sign(message, shared) for message in messages]
    seconds["sign, per client"] = lap() / _CLIENTS
    message, statement = messages[0], statements[0]
    received = SignedInstruction.of(message)
    assert received is not None
    received.verify(key.public_key(), message, node=0, run=message.metadata.run_id)
    message.content = received.content()
    seconds["verify and open"] = lap()
    reply = answer(message, {"name": "a"}, arrays=message.content.array_records[ARRAYS])
    lap()
    received.authenticate(reply)
    seconds["authenticate the reply"] = lap()
    open_reply(reply, statement)
    seconds["open the reply"] = lap()
    return seconds


def measure(blocks: int) -> dict[str, float]:
    """Return the median seconds of each operation, for a message with an adapter."""
    key, state = Ed25519PrivateKey.generate(), draw_adapter(blocks, seed=0)
    found = [_round_trip(key, state) for _ in range(_REPETITIONS)]
    return {name: median(each[name] for each in found) for name in found[0]}


def main() -> None:
    """Measure, and print a table."""
    command(__doc__).parse_args()
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    measured = {blocks: measure(blocks) for blocks in _BLOCKS}
    table = make_table(f"ms per message, {_CLIENTS} clients", "adapter, MB", *measured[_BLOCKS[0]])
    for blocks, found in measured.items():
        size = sum(value.nbytes for value in draw_adapter(blocks, seed=0).values()) / 1e6
        table.add_row(f"{size:.0f}", *(f"{1e3 * value:.1f}" for value in found.values()))
    show(table)


if __name__ == "__main__":
    main()
