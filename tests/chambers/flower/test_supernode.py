"""What ``chambers-supernode`` does where Flower's SuperNode would wait or stop for good."""

import ssl
import subprocess
import sys
import time
from threading import Event

import httpx
import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import nodestate_factory
from starlette.testclient import TestClient

from chambers.flower import supernode
from tests.chambers.conftest import ROOT

# Start the program with a loop that ends, or heartbeats that fail, while the HTTP server continues.
ENDING = """
import sys, threading, time
from chambers.flower import supernode
threading.Thread(target=time.sleep, args=(600,)).start()
def loop():
    if sys.argv[1] == "heartbeat":
        supernode.fleet_http_connection.HeartbeatSender(lambda: 1 / 0).start()
        time.sleep(600)
supernode.flower_supernode = loop
supernode.main()
"""


def failed(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (failed(httpx.ConnectError("EOF occurred in violation of protocol (_ssl.c:1006)")), True),
        (failed(httpx.ReadError("TLS/SSL connection has been closed"), ssl.SSLEOFError()), True),
        (failed(httpx.ConnectError("refused"), OSError()), True),
        (failed(httpx.ConnectError("[SSL]"), ssl.SSLCertVerificationError("expired")), False),
    ],
)
def test_only_a_certificate_that_can_not_be_verified_is_final(error, again):
    assert supernode.make_retry_invoker().should_giveup(error) is not again


@pytest.mark.parametrize(("status", "again"), [(503, True), (502, True), (404, False)])
def test_statuses_are_judged_as_by_flower(status, again):
    response = httpx.Response(status, request=httpx.Request("POST", "https://localhost"))
    error = httpx.HTTPStatusError("", request=response.request, response=response)
    assert supernode.make_retry_invoker().should_giveup(error) is not again


def test_objects_that_stop_coming_end_the_pull(monkeypatch):
    monkeypatch.setattr(supernode, "PULL_SECONDS", 1.0)
    started = time.monotonic()

    def slowly(identifier):
        if time.monotonic() < started + 0.6 * int(identifier):
            raise ObjectUnavailableError(identifier)
        return identifier.encode()

    names = ["1", "2", "3", "4"]  # one arrives every 0.6 s
    assert supernode.pull_objects(names, slowly, initial_backoff=0.1) == {
        name: name.encode() for name in names
    }
    with pytest.raises(ObjectPullError, match="no object of the message has arrived for 1 s"):
        supernode.pull_objects(["9"], slowly, initial_backoff=0.1)


@pytest.mark.parametrize("what", ["loop", "heartbeat"])
def test_the_process_ends_with_flowers_loop_or_its_heartbeats(what):
    ended = subprocess.run([sys.executable, "-c", ENDING, what], cwd=ROOT, check=False, timeout=120)
    assert ended.returncode == 75  # so that a supervisor restarts it


def test_its_health_tells_since_when_it_is_offline(monkeypatch):
    state = nodestate_factory.NodeStateFactory(ObjectStoreFactory())
    client = TestClient(supernode.create_app(state_factory=state))
    supernode.Contact.note()
    assert client.get("/health").status_code == 200
    monkeypatch.setattr(supernode.Contact, "last", 1e9)
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"offline-since": "2001-09-09T01:46:40+00:00"}
    supernode.make_retry_invoker().invoke(lambda: None)
    assert client.get("/health").status_code == 200
    for succeeds in (False, True):
        monkeypatch.setattr(supernode.Contact, "last", 1e9)
        asked = Event()

        def beat(asked=asked, succeeds=succeeds):
            asked.set()
            return succeeds

        heartbeat = supernode.Heartbeat(beat)
        heartbeat.start()
        assert asked.wait(60)
        heartbeat.stop()
        assert (client.get("/health").status_code == 200) is succeeds
