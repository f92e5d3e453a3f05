"""Attacks by an outsider in an institution's network; the answers are printed as JSON.

python outsider.py interfaces HOST:PORT authority.pem
python outsider.py paths HOST:PORT authority.pem
python outsider.py ports HOST:PORT …
python outsider.py block-server HOST:PORT
python outsider.py silent HOST:PORT SECONDS
"""

import json
import resource
import secrets
import socket
import ssl
import sys
import time
from contextlib import suppress

import httpx
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StreamLogsRequest,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from split.lane.dialling import open_lane
from split.protocol.errors import LaneError
from split.protocol.frames import Limits
from split.protocol.keys import ServerKeys
from split.protocol.tickets import IDENTIFIER_BYTES, SECRET_BYTES, Identity, Invitation, Ticket

SECONDS = 120.0
# The beginning of a TLS handshake.
HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(9)
SUITE = "ml-kem-768-x25519"
# Paths that the proxy or the SuperLink could interpret as a different path.
DISGUISED = (
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet/..%2fcontrol/list-nodes",
    "/v1/fleet%2f..%2fcontrol/list-nodes",
    "//v1/control/list-nodes",
    "/v1/control/list-nodes?/v1/fleet/",
    "/v1/control/list-nodes#/v1/fleet/",
    "/v1/control/list-nodes/../../fleet/../control/list-nodes",
    "/v1/./control/list-nodes",
    "https://localhost/v1/control/list-nodes",
    "/health/../v1/control/list-nodes",
    "/docs",
    "/openapi.json",
    "/",
)


def interfaces(address: str, authority: str) -> dict[str, list]:
    """Call Flower's interfaces with Flower's clients and an unregistered key."""
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)

    def connected(kind, *interceptors):
        return kind.from_server_address(address, False, authority, interceptors=interceptors)

    control, runtime = connected(ControlHttpClient), connected(RuntimeHttpClient)
    fleet = connected(FleetHttpClient, NodeAuthHttpInterceptor(private, public))
    calls = {
        "submit a run": lambda: control.StartRun(StartRunRequest()),
        "register a node": lambda: control.RegisterNode(RegisterNodeRequest(public_key=key)),
        "list nodes": lambda: control.ListNodes(ListNodesRequest()),
        "read logs": lambda: list(control.StreamLogs(StreamLogsRequest(run_id=1))),
        "take a task": lambda: runtime.AcquireTask(AcquireTaskRequest()),
        "register as a SuperNode": lambda: fleet.RegisterNode(
            RegisterNodeFleetRequest(public_key=key)
        ),
        "be active unregistered": lambda: fleet.ActivateNode(ActivateNodeRequest(public_key=key)),
        "pull another's messages": lambda: fleet.PullMessages(
            PullMessagesRequest(node=Node(node_id=1))
        ),
    }
    answers = {}
    for name, call in calls.items():
        try:
            call()
            answers[name] = [200, ""]
        except httpx.HTTPStatusError as error:
            answers[name] = [error.response.status_code, error.response.text]
    return answers


def paths(address: str, authority: str) -> dict[str, str]:
    """Send paths without normalising them, as client libraries would; return the status lines."""
    host, port = address.split(":")
    trust = ssl.create_default_context(cafile=authority)
    answers = {}
    for path in DISGUISED:
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            trust.wrap_socket(plain, server_hostname=host) as connection,
        ):
            request = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(request.encode())
            answers[path] = connection.recv(4096).decode().partition("\r\n")[0]
    return answers


def ports(*addresses: str) -> list[str]:
    """Connect to each address, and return the addresses that accept connections."""
    return [address for address in addresses if is_open(address)]


def is_open(address: str) -> bool:
    """Return whether a program listens at an address."""
    host, number = address.split(":")
    try:
        socket.create_connection((host, int(number)), timeout=3).close()
    except OSError:
        return False
    return True


def silent(address: str, seconds: str) -> int:
    """Keep 2,000 connections open that begin a TLS handshake; return how many were accepted."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    host, port = address.split(":")
    end = time.monotonic() + float(seconds)
    kept: list[socket.socket] = []
    accepted = 0
    while time.monotonic() < end:
        while len(kept) < 2000 and time.monotonic() < end:
            with suppress(OSError):
                connection = socket.create_connection((host, int(port)), timeout=5)
                connection.setblocking(False)
                kept.append(connection)
                connection.send(HELLO)
                accepted += 1
        time.sleep(0.2)
        kept = [each for each in kept if not is_closed(each)]
    return accepted


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def block_server(address: str) -> str:
    """Wait for a block server, and request a lane with a ticket that it has not issued."""
    end = time.monotonic() + SECONDS
    while not is_open(address):
        if time.monotonic() > end:
            return "no block server"
        time.sleep(0.5)
    invitation = Invitation(
        address=address,
        suite=SUITE,
        server_key=ServerKeys(SUITE).public,
        identity=Identity("run", 1, "court"),
        ticket=Ticket(secrets.token_bytes(IDENTIFIER_BYTES), secrets.token_bytes(SECRET_BYTES)),
    )
    now = time.monotonic()
    limits = Limits(32, "bfloat16", 65536)
    try:
        open_lane(invitation, limits, now + 20, 1.0, 0.0, busy_until=now)
    except LaneError as error:
        return f"{type(error).__name__}: {error}"
    return "open"


if __name__ == "__main__":
    attempts = {
        "interfaces": interfaces,
        "paths": paths,
        "ports": ports,
        "block-server": block_server,
        "silent": silent,
    }
    print(json.dumps(attempts[sys.argv[1]](*sys.argv[2:])))
