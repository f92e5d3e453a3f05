"""A SuperLink whose database's disk is full: what users see, and that runs continue afterwards."""

import os
import secrets
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ArrayRecord, RecordDict
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from tests.chambers.conftest import ROOT
from tests.chambers.site.deployment import (
    APP,
    Coordinator,
    Institution,
    documented,
    end,
    proxy,
    serving,
    start,
)
from tests.conftest import fill, mounted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "deployment.md").read_text()
FULL = "(sqlite3.OperationalError) database or disk is full"

# The app waits for a file, and then sends a message that is too large for the database.
BIG = APP["tiny.py"].replace(
    b"    message = Message(content=RecordDict(),",
    b"""    import os, pathlib
    from flwr.app import ConfigRecord
    while not pathlib.Path(context.run_config["wait-for"]).exists():
        time.sleep(0.2)
    content = RecordDict({"large": ConfigRecord({"bytes": os.urandom(8_000_000)})})
    message = Message(content=content,""",
)


@pytest.fixture
def coordinator(nginx, tmp_path, request):
    """A SuperLink whose database's disk has 40 MiB, or the size that a test passes."""
    folder = tmp_path / "coordinator"
    (folder / "release").mkdir(parents=True)
    with serving(folder / "release") as url:
        coordinator = Coordinator(folder, url)
        secret = folder / "superexec.secret"
        secret.write_bytes(secrets.token_bytes(32))
        with mounted(folder / "database", getattr(request, "param", "40m")):
            words = ("--isolation=process", "--superexec-auth-secret-file=superexec.secret")
            # Flower's own program also stores messages to oneself, which stand for large replies.
            coordinator.start(*words, program="flower-superlink")
            yield coordinator
            coordinator.stop()


def superexec(coordinator):
    """Start the SuperExec, and restart it whenever it ends, as a supervisor does."""
    return start(
        *("flower-superexec", "--runtime-api-address", coordinator.address),
        *("--root-certificates", "authority.pem"),
        "--superexec-auth-secret-file=superexec.secret",
        folder=coordinator.folder,
        environment=coordinator.environment,
        log=coordinator.folder / "superexec.log",
    )


def write_app(folder: Path, go: Path) -> Path:
    folder.mkdir()
    setting = f'wait-for = "{go}"\n'.encode()
    (folder / "pyproject.toml").write_bytes(APP["pyproject.toml"] + setting)
    (folder / "tiny.py").write_bytes(BIG)
    return folder


@pytest.mark.nightly
def test_everything_but_the_run_continues_once_there_is_space(coordinator, tmp_path):
    go, log = tmp_path / "go", coordinator.folder / "superlink.log"
    app = write_app(tmp_path / "app", go)
    submit = ("flwr", "run", app, "deployment")
    institution = Institution(tmp_path / "court", coordinator)
    program = superexec(coordinator)
    with (
        proxy(coordinator.folder, coordinator.address) as address,
        institution.supernode(superlink=address) as supernode,
    ):
        wait_until(lambda: coordinator.nodes()[institution.node] == "online", 60)
        coordinator.command(*submit)
        wait_until(lambda: coordinator.runs()[0]["status"] == "running", 60)
        fill(coordinator.folder / "database")
        go.touch()
        program.wait(60)
        # Wait until a heartbeat of the SuperNode has been refused.
        wait_until(
            lambda: (
                f"send-node-heartbeat][UnexpectedError:OperationalError] {FULL}" in log.read_text()
            ),
            60,
        )
        status, said = coordinator.command(*submit, check=False)
        assert status != 0 and "Internal server error." in said
        assert f"### `{FULL.partition(') ')[2]}`" in PAGE
        (coordinator.folder / "database" / "ballast").unlink()
        program = superexec(coordinator)
        status, said = coordinator.run(app)
        assert status == "finished:completed", said
        assert supernode.poll() is None and coordinator.superlink.poll() is None
        wait_until(lambda: coordinator.runs()[-1]["status"].startswith("finished:failed"), 90)
        details = coordinator.runs()[-1]["status-details"]
        assert details == "No heartbeat received from the task"
    end(program)


class Attacker:
    """An institution that sends messages to itself from a separate address."""

    def __init__(self, institution, proxy: str, run: int):
        self.node, self.run = int(institution.node), run
        private = load_ssh_private_key(institution.key.read_bytes(), None)
        self.client = FleetHttpClient(
            f"https://{proxy}",
            interceptors=[NodeAuthHttpInterceptor(private, private.public_key())],
        )
        trust = ssl.create_default_context(cafile=institution.folder / "authority.pem")
        transport = httpx.HTTPTransport(verify=trust, local_address="127.0.0.2")
        self.client._client = httpx.Client(transport=transport, timeout=30)
        public = public_key_to_bytes(private.public_key())
        self.client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=1800))

    def send(self) -> None:
        """Send 20 objects of 1 MB each and 20 small objects."""
        arrays = [np.frombuffer(os.urandom(1_000_000), np.uint8) for _ in range(20)]
        metadata = Metadata(self.run, "", 1, self.node, "", "", time.time(), 3600, "query")
        message = make_message(metadata, RecordDict({"large": ArrayRecord(arrays)}))
        metadata.__dict__["_message_id"] = message.object_id
        pushed = self.client.PushMessages(
            PushMessagesRequest(
                node=Node(node_id=self.node),
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
            )
        )
        objects = get_all_nested_objects(message)
        assert pushed.objects_to_push
        for name in pushed.objects_to_push:
            request = PushObjectRequest(
                node=Node(node_id=self.node),
                run_id=self.run,
                session_id=pushed.session_id,
                object_id=name,
                object_content=objects[name].deflate(),
            )
            assert self.client.PushObject(request).stored


# 0.2 GB are sent, and their deletion also takes space in the WAL.
@pytest.mark.nightly
@pytest.mark.parametrize("coordinator", ["900m"], indirect=True)
def test_an_institution_that_floods_itself_is_slowed_down_and_named(coordinator, tmp_path):
    """The run continues, and restoring the database deletes what was sent."""
    go, database = tmp_path / "go", coordinator.folder / "database" / "superlink.db"
    app = write_app(tmp_path / "app", go)
    court = Institution(tmp_path / "court", coordinator)
    other = Institution(tmp_path / "other", coordinator)
    program, over = superexec(coordinator), threading.Event()

    def large() -> int:
        lines = map(
            str.split, (coordinator.folder / "proxy" / "access.log").read_text().splitlines()
        )
        return sum(line[0] == "127.0.0.2" and int(line[5]) > 1_000_000 for line in lines)

    def flood():
        with suppress(httpx.HTTPStatusError):  # the run has ended
            while not over.is_set():
                attacker.send()

    def ended() -> bool:
        with suppress(KeyError):  # the SuperLink may be too busy to answer flwr
            return coordinator.runs()[0]["status"].startswith("finished")
        return False

    with (
        proxy(coordinator.folder, coordinator.address) as address,
        court.supernode(superlink=address),
        ThreadPoolExecutor(1) as pool,
    ):
        wait_until(lambda: coordinator.nodes()[court.node] == "online", 60)
        coordinator.command("flwr", "run", app, "deployment")
        wait_until(lambda: coordinator.runs()[0]["status"] == "running", 60)
        attacker = Attacker(other, address, int(coordinator.runs()[0]["run-id"]))
        started = time.monotonic()
        flooding = pool.submit(flood)
        try:
            wait_until(lambda: large() >= 200, 240)
            go.touch()
            wait_until(ended, 240)
            assert large() <= 200 + (time.monotonic() - started) + 2
        finally:
            over.set()
        flooding.result()
        assert coordinator.runs()[0]["status"] == "finished:completed"
    end(program)
    _, said = coordinator.command("chambers", "site", "check", check=False)
    assert "ok   127.0.0.2 has sent the most data in the last " in said
    assert "database is on a file system of its own" in said
    backup, restore, _ = documented("Back up and restore")
    coordinator.stop()
    assert database.stat().st_size > 200_000_000
    coordinator.command("bash", "-ec", backup + restore)
    assert database.stat().st_size < 20_000_000
    coordinator.start()
    assert court.node in coordinator.nodes()
