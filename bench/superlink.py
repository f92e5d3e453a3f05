"""Cost of the filter in ``chambers-superlink``, and of the proxy's limit on connections.

    python -m bench.superlink

Two SuperLinks, Flower's and Chambers', get the same replies of a registered node in turn, directly
over TLS. The replies name a run that doesn't exist, so nothing is stored. Then pieces of arrays are
sent to Chambers' SuperLink through the proxy of docker/, and through the same proxy without its
stream, in turn.
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import httpx
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node

from bench.harness import make_table, show
from chambers.site.keys import read_node_key
from chambers.superlink import free_port
from federation.flower_internals import FleetHttpClient, NodeAuthHttpInterceptor
from tests.chambers.site.deployment import Coordinator, Institution, proxy, running_nginx
from tests.waiting import wait_until

# Objects of this size in MiB are sent; Flower sends larger arrays in such pieces.
_MIB = 5
_MESSAGES, _OBJECTS, _PAIRS = 1000, 6, 15


@contextmanager
def _superlink(folder: Path, program: str) -> Iterator[tuple[Coordinator, Institution]]:
    folder.mkdir()
    coordinator = Coordinator(folder / "coordinator", "http://127.0.0.1:1")
    coordinator.start(program=program)
    try:
        yield coordinator, Institution(folder / "court", coordinator)
    finally:
        coordinator.stop()


def _client(institution: Institution, address: str) -> FleetHttpClient:
    key = read_node_key(institution.key)
    authority = (institution.folder / "authority.pem").read_bytes()
    interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
    return FleetHttpClient.from_server_address(address, False, authority, interceptors)


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    try:
        call()
    except httpx.HTTPStatusError as error:
        assert error.response.status_code not in {401, 503}, error
    return 1000 * (time.perf_counter() - started)


def _reply(node: int) -> PushMessagesRequest:
    metadata = Metadata(
        run_id=1, message_id="1", src_node_id=node, dst_node_id=1, reply_to_message_id="2",
        message_type="train", created_at=time.time(), ttl=60.0,
    )  # fmt: skip
    tree = ObjectTree(object_id="1")
    message = Message(metadata=metadata)
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=[message], message_object_trees=[tree]
    )


def _without_stream(folder: Path) -> str:
    """Write the proxy's configuration without the stream; return the address that it listens at."""
    text, address = (folder / "nginx.conf").read_text(), f"127.0.0.1:{free_port()}"
    before, _, after = text.partition("stream {")
    _, _, after = after.partition("\n}\n")
    lines = [line for line in after.splitlines() if "real_ip" not in line]
    text = before.replace("nginx.pid", "other.pid") + "\n".join(lines)
    start = text.index("listen 127.0.0.1:")
    end = text.index(";", start)
    text = text[:start] + f"listen {address} ssl" + text[end:]
    start = text.rindex("listen 127.0.0.1:")
    text = text[:start] + f"listen 127.0.0.1:{free_port()}" + text[text.index(";", start) :]
    (folder / "other.conf").write_text(text)
    return address


def _compare(title: str, what: str, calls: Mapping[str, Callable[[], float]], times: int) -> None:
    """Call each in turn, and show the medians."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times):
        for name, call in calls.items():
            values[name].append(call())
    table = make_table("", f"{what}, median")
    for name, own in values.items():
        table.add_row(name, f"{median(own):.2f}")
    first, last = (median(own) for own in values.values())
    show(title, table, f"ratio: {last / first:.3f}")


def main() -> None:
    """Measure, and show both tables."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        calls, folder = {}, Path(name)
        for program in ("flower-superlink", "chambers-superlink"):
            link, court = stack.enter_context(_superlink(folder / program, program))
            store, reply = _client(court, link.address).PushMessages, _reply(int(court.node))
            calls[program] = partial(_milliseconds, partial(store, reply))
        _compare("Messages", "ms", calls, _MESSAGES)

        through = stack.enter_context(proxy(link.folder, link.address))
        direct = _without_stream(link.folder)
        stack.enter_context(running_nginx(link.folder, "other.conf"))
        request = PushObjectRequest(
            node=Node(node_id=int(court.node)), run_id=1, session_id="1", object_id="1",
            object_content=secrets.token_bytes(_MIB * 2**20),
        )  # fmt: skip
        calls = {}
        for kind, address in {"without the stream": direct, "with the stream": through}.items():
            send = partial(_client(court, address).PushObject, request)
            wait_until(partial(_answers, send), 20)
            calls[kind] = partial(_rate, send)
        _compare("Objects", "MiB/s", calls, _PAIRS)


def _answers(send: Callable[[], object]) -> bool:
    try:
        return _milliseconds(send) > 0
    except httpx.TransportError:  # nginx is starting
        return False


def _rate(send: Callable[[], object]) -> float:
    return _OBJECTS * _MIB / sum(_milliseconds(send) for _ in range(_OBJECTS)) * 1000


if __name__ == "__main__":
    main()
