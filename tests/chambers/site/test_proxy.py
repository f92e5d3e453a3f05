"""How much one address can send through the proxy of docker/, and which address is reported."""

import http.client
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.retry.http_retry import _RETRYABLE_STATUS_CODES

from chambers.site.authority import INSIDE, open_authority
from chambers.site.check_coordinator import report_on_coordinator
from chambers.superlink import free_port
from tests.chambers.site.deployment import proxy, running_nginx
from tests.marks import nightly
from tests.waiting import wait_until

OBJECT, MESSAGE = "/v1/fleet/push-object", "/v1/fleet/push-messages"
# A server that accepts every request, and logs the address that it came from.
SUPERLINK = """
pid superlink.pid;
error_log stderr;
events {{}}
http {{
    log_format addresses $http_x_forwarded_for;
    access_log superlink.log addresses;
    client_body_temp_path temporary;
    client_max_body_size 0;
    server {{
        listen {address} ssl;
        ssl_certificate server.pem;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.3;
        return 200;
    }}
}}
"""


class Coordinator:
    """A proxy in front of a stand-in for the SuperLink."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address

    def connection(self, source: str) -> http.client.HTTPSConnection:
        """Return a connection from one of this machine's addresses."""
        trust = ssl.create_default_context(cafile=self.folder / "authority.pem")
        host, port = self.address.split(":")
        return http.client.HTTPSConnection(
            host, int(port), source_address=(source, 0), context=trust, timeout=30
        )

    def received(self, source: str) -> int:
        """Return how many requests from an address have reached the SuperLink."""
        return (self.folder / "superlink.log").read_text().splitlines().count(source)

    @property
    def log(self) -> Path:
        return self.folder / "proxy" / "access.log"


def post(connection, path: str, body: bytes | list[bytes] = b"") -> int:
    """Send a request, and return the status of the answer."""
    connection.request("POST", path, body)
    with connection.getresponse() as answer:
        answer.read()
    return int(answer.status)


@pytest.fixture
def coordinator(nginx, tmp_path):
    open_authority(tmp_path).issue(tmp_path, list(INSIDE), 365)
    superlink = f"127.0.0.1:{free_port()}"
    (tmp_path / "superlink.conf").write_text(SUPERLINK.format(address=superlink))
    with running_nginx(tmp_path, "superlink.conf"), proxy(tmp_path, superlink) as address:
        coordinator = Coordinator(tmp_path, address)

        def answers():
            with suppress(OSError):
                return post(coordinator.connection("127.0.0.1"), "/health") == 200

        wait_until(answers, 20)
        yield coordinator


def checked(coordinator, capsys) -> str:
    """Return the output of ``chambers site check``."""
    report_on_coordinator(coordinator.folder, "", superlink="127.0.0.1:1", proxy="127.0.0.1:1")
    return str(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "at_once", "per_second"),
    [
        nightly(OBJECT, bytes(1_000_000), 200, 1),
        (OBJECT, [b"of a length that is not told"], 200, 1),
        nightly(OBJECT, bytes(100_000), 800, 5),
        (OBJECT, bytes(1_000), 2000, 20),
        nightly(MESSAGE, bytes(1_000), 60, 2),
    ],
    ids=["large", "unknown", "medium", "small", "messages"],
)
def test_a_flood_is_held_to_its_rate_and_its_address_is_named(
    coordinator, capsys, path, body, at_once, per_second
):
    """Meanwhile, an honest institution's messages pass without delay."""
    over, started = threading.Event(), time.monotonic()

    def flood():
        connection = coordinator.connection("127.0.0.2")
        while not over.is_set():
            post(connection, path, body)

    with ThreadPoolExecutor(4) as attackers:
        floods = [attackers.submit(flood) for _ in range(4)]
        try:
            wait_until(lambda: coordinator.received("127.0.0.2") >= at_once, 120)
            honest = coordinator.connection("127.0.0.1")
            assert {post(honest, OBJECT, bytes(5 * 2**20)) for _ in range(6)} == {200}
            assert {post(honest, OBJECT, bytes(500_000)) for _ in range(60)} == {200}
            assert {post(honest, MESSAGE, bytes(100_000)) for _ in range(6)} == {200}
            three_seconds = at_once + 3 * per_second
            wait_until(lambda: coordinator.received("127.0.0.2") >= three_seconds, 120)
            passed = coordinator.received("127.0.0.2")
            assert passed <= at_once + per_second * (time.monotonic() - started) + 2
        finally:
            over.set()
    for each in floods:
        each.result()
    most = "127.0.0.2" if at_once * len(body) > 65_000_000 else "127.0.0.1"
    assert f"ok   {most} has sent the most data in the last " in checked(coordinator, capsys)


def test_refused_requests_are_retried_and_not_logged(coordinator):
    first = coordinator.connection("127.0.0.2")
    assert {post(first, MESSAGE) for _ in range(61)} == {200}
    waiting = [coordinator.connection("127.0.0.2") for _ in range(60)]
    with ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(post, connection, MESSAGE) for connection in waiting]
        statuses = (each.result() for each in as_completed(answers))
        refused = next(status for status in statuses if status != 200)
        for connection in waiting:
            with suppress(OSError, AttributeError):  # closed after an answer
                connection.sock.shutdown(socket.SHUT_RDWR)
    assert refused == 503 in _RETRYABLE_STATUS_CODES
    assert " 503 " not in coordinator.log.read_text()


def test_bodies_are_no_larger_than_what_flower_sends(coordinator):
    pushing = coordinator.connection("127.0.0.2")
    for path, most in ((OBJECT, 6 * 2**20), (MESSAGE, 2**20), ("/v1/fleet/get-run", 2**16)):
        assert post(pushing, path, bytes(most)) == 200
        assert post(pushing, path, bytes(most + 1)) == 413
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < 6 * 2**20 - 1000
    assert " 413 " not in coordinator.log.read_text()


def test_requests_of_outsiders_cannot_forge_the_log(coordinator, capsys):
    forged = '10.0.0.9 [2030-01-01T00:00:00+00:00] "POST /v1/fleet/push-object" 200 999999999 1 1'
    connection = coordinator.connection("127.0.0.2")
    for path in (f'/v1/fleet/x" 200 999999999 1 1\n{forged}\n', "/v1/fleet/" + 4000 * "X"):
        assert post(connection, quote(path)) == 200
    assert post(connection, "/v1/control/list-nodes") == 403
    lines = coordinator.log.read_text().splitlines()
    (first, *lines), whole = lines, len(coordinator.log.read_bytes())
    assert "GET /health" in first or "POST /health" in first
    assert len(lines) == 2 and all(line.startswith("127.0.0.2 [") for line in lines)
    assert whole < 3 * 200
    assert "ok   no address has sent anything in the last hour" in checked(coordinator, capsys)
