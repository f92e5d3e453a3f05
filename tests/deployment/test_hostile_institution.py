"""A registered institution, the consultation, attacks the coordinator and the court."""

import base64
import os
import sqlite3
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from safetensors.torch import load_file

from federation.authentication import Signer, read_private_key
from federation.messages import ARRAYS, CONFIG, Instruction, to_arrays
from federation.packed_content import EncryptedArrays
from federation.run_config import parse_run_config
from federation.run_folder import METRICS, read_events
from server_app.main import first_adapter
from tests.deployment.conftest import results
from tests.deployment.deployment import CHECKOUT, COMPLETED
from tests.deployment.faults import newest_run, wait_for_end
from tests.deployment.greedy import BYTES
from tests.deployment.hosts import FOLDER
from tests.deployment.test_survival import SECONDS, audited
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
MEMBER = Path(__file__).with_name("member.py")
GREEDY = Path(__file__).with_name("greedy.py")
# Flower's id of the ServerApp's node, in all runs.
COORDINATOR = 1
SETTINGS = {
    "strategy": "fedjudge-base",
    "rounds": 3,
    "min-nodes": 1,
    "train.local-steps": 150,
    "train.batch-size": 2,
    "train.accumulation": 1,
}


REFUSALS = ("is not signed", "for a different institution", "was received before")


class Attack:
    """The consultation's knowledge of a run, and the messages that it sends."""

    def __init__(self, running, run):
        self.running, self.run = running, run
        database = running.hosts["coordinator"].folder / "database" / "superlink.db"
        self.database = f"file:{database}?mode=ro"
        rows = self.query("SELECT name, node_id FROM node")
        self.nodes = {name: int64_to_uint64(number) for name, number in rows}

    def query(self, *words):
        with closing(sqlite3.connect(self.database, uri=True)) as connection:
            return connection.execute(*words).fetchall()

    def message(self, kind, content, source, target, reply_to=""):
        metadata = Metadata(
            run_id=self.run,
            message_id="",
            src_node_id=source,
            dst_node_id=target,
            reply_to_message_id=reply_to,
            group_id="",
            created_at=time.time(),
            ttl=300.0,
            message_type=kind,
        )
        return make_message(metadata=metadata, content=content)

    def send(self, *messages: Message, announce=()):
        """Send messages with the consultation's key, or announce objects in the last message."""
        texts = [base64.b64encode(message_to_proto(m).SerializeToString()) for m in messages]
        supernode = self.running.programs["consultation"]["supernode"]
        environment = supernode.view.environment | {"PYTHONPATH": str(CHECKOUT)}
        command = [
            *(sys.executable, str(MEMBER), self.running.address, "authority.pem", "node"),
            *(str(self.nodes["consultation"]), *(text.decode() for text in texts)),
            *(("announce", *announce) if announce else ()),
        ]
        view = replace(supernode.view, environment=environment)
        said = supernode.host.run(command, view, seconds=120).stdout
        assert said.splitlines()[-1] == "sent", said

    def announce(self, objects):
        """Announce objects with different children in a message to the ServerApp.

        The SuperLink delivers the message together with any reply. It discards the announced
        objects if they aren't sent within three minutes.
        """
        self.send(self.message("query", RecordDict(), COORDINATOR, COORDINATOR), announce=objects)


def events(running, kind):
    return [e for e in read_events(newest_run(running) / METRICS) if e["event"] == kind]


def accepted(court):
    return [e for e in audited(court) if (e["event"], e["kind"]) == ("accepted", "train")]


@pytest.mark.nightly
def test_nobody_speaks_in_another_s_name(running):
    court, before = running.hosts["court"], newest_run(running)
    audit = len(audited(court))
    attack = Attack(running, running.submit(SETTINGS))
    coordinator, target = COORDINATOR, attack.nodes["court"]
    wait_until(lambda: newest_run(running) != before, SECONDS)

    attack.announce(first_arrays(running, SETTINGS))
    wait_until(lambda: checkpoints(running), SECONDS)
    known = next(e for e in audited(court)[audit:] if e["event"] == "reply" and "base" in e)

    # A forged instruction that overwrites the court's final adapter.
    about = Instruction(9, known["run"], known["base"], 60.0, final=True)
    weights = load_file(checkpoints(running)[0])
    # Use ones, because zeros are among the announced arrays.
    ones = {name: value * 0 + 1 for name, value in weights.items() if "lora_" in name}
    content = RecordDict({CONFIG: about.to_record(), ARRAYS: to_arrays(ones)})
    forged = attack.message("evaluate", content, coordinator, target)
    # Instructions that the coordinator has signed for the consultation and for the court.
    signer = Signer(read_private_key(running.hosts["coordinator"].folder / "instructions.key"))
    query = RecordDict({CONFIG: Instruction(0, known["run"], "", 60.0).to_record()})
    own = attack.message("query", query, coordinator, attack.nodes["consultation"])
    signer.sign(own, EncryptedArrays())
    misdirected = attack.message("query", own.content, coordinator, target)
    query = RecordDict({CONFIG: Instruction(0, "repeated", "", 60.0).to_record()})
    genuine = attack.message("query", query, coordinator, target)
    signer.sign(genuine, EncryptedArrays())
    repeated = attack.message("query", genuine.content, coordinator, target)
    attack.send(forged, misdirected, genuine, repeated)
    wait_until(lambda: len(refusals(court, audit)) == 3, SECONDS)

    # A reply in the court's name, which needs an id that only the court has read.
    trained = len(accepted(court))
    wait_until(lambda: len(accepted(court)) > trained, SECONDS)
    ((asked,),) = attack.query(
        "SELECT message_id FROM message_ins WHERE dst_node_id = ? AND message_type LIKE 'train%'",
        (uint64_to_int64(target),),
    )
    problem = RecordDict({CONFIG: ConfigRecord({"name": "court", "problem": "out of memory"})})
    attack.send(attack.message("train", problem, target, coordinator, reply_to=asked))

    assert wait_for_end(running) == COMPLETED
    problems = refusals(court, audit)
    for problem, said in zip(problems, REFUSALS, strict=True):
        assert said in problem
    rounds = events(running, "round")
    left_out = [each for round_ in rounds for each in round_["left_out"]]
    reason = "its reply is refused: it isn't authenticated; it says: out of memory"
    assert left_out == [{"client": "court", "reason": reason}]
    # Its reply is forged in round 2, or in round 1 if that began before the refusals.
    assert [each["participants"] for each in rounds].count(["consultation", "court"]) == 2
    final = results(running) / "adapters" / "global" / "adapter_model.safetensors"
    (saved,) = (court.folder / "state").rglob(f"{known['run']}/court/adapters/global/{final.name}")
    assert saved.read_bytes() == final.read_bytes()


def first_arrays(running, settings):
    """Return the ids of the arrays with which a run begins; they follow from the run config."""
    files = running.programs["coordinator"]["superexec"].view.mounts
    model = files.get(f"{FOLDER}/model", running.settings["model.name"])
    state, _ = first_adapter(parse_run_config(settings | {"model.name": str(model)}), Path(model))
    return sorted({array.object_id for array in to_arrays(state).values()})


@pytest.mark.nightly
def test_a_reply_that_fills_the_memory_is_left_out(running, tmp_path):
    settings = SETTINGS | {"train.local-steps": 1, "evaluate.every": 3}
    before = newest_run(running)
    with clientapp_of_its_own(running.programs["consultation"]["superexec"], tmp_path):
        running.submit(settings)
        wait_until(lambda: newest_run(running) != before, SECONDS)
        wait_until(lambda: len(events(running, "round")) >= 2, SECONDS)
        peak = max_memory(running)
        first, second = events(running, "round")  # the ServerApp was still running
        assert wait_for_end(running) == COMPLETED
    reason = "its reply is larger than 64 MiB"
    for round_ in (first, second):
        assert round_["participants"] == ["court"]
        assert round_["left_out"] == [{"client": "consultation", "reason": reason}]
    assert events(running, "round")[2]["participants"] == ["consultation", "court"]
    assert peak < BYTES / 2


@contextmanager
def clientapp_of_its_own(superexec, folder):
    """Make an institution answer with the program in greedy.py instead of Flower's."""
    own = superexec.view
    program = folder / "flwr-clientapp"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={CHECKOUT} exec {sys.executable} {GREEDY} "$@"\n')
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{own.environment['PATH']}"
    superexec.stop()
    superexec.view = replace(own, environment=own.environment | {"PATH": path})
    superexec.start()
    yield
    superexec.stop()
    superexec.view = own
    superexec.start()


def max_memory(running):
    """Return the peak memory, in bytes, of the run's ServerApp so far."""
    processes = running.programs["coordinator"]["superexec"].processes()
    states = [Path(f"/proc/{each.pid}/status").read_text() for each in processes]
    (state,) = (state for state in states if state.startswith("Name:\tflwr-serverapp"))
    (line,) = (line for line in state.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.nightly
def test_an_unsigned_run_whose_messages_are_blocked_ends_with_the_reason(running, unsigned):
    """Without signatures, anyone can compute what the first messages contain."""
    settings = SETTINGS | {"instruction-key": "none", "rounds": 1, "train.local-steps": 1}
    superexec = running.programs["consultation"]["superexec"]
    superexec.stop()  # so that registration waits for it
    attack = Attack(running, running.submit(settings))
    # Before the run starts, the SuperLink accepts no messages.
    wait_until(lambda: running.status() == "running", SECONDS)
    attack.announce(first_arrays(running, settings))
    superexec.start()
    status = wait_for_end(running)
    assert status.startswith("finished:failed: ")
    for name in ("consultation", "court"):
        assert f"{name}: the message to it could not be sent" in status


@pytest.fixture
def unsigned(running):
    """Make the institutions accept unsigned instructions."""
    files = [running.hosts[name].folder / "policy.toml" for name in running.institutions]
    policies = [file.read_text() for file in files]
    for file, policy in zip(files, policies, strict=True):
        key, *others = policy.splitlines(keepends=True)
        assert key.startswith("instruction-key")
        file.write_text("".join(others))
    yield
    for file, policy in zip(files, policies, strict=True):
        file.write_text(policy)


def refusals(court, start):
    return [e["problem"] for e in audited(court)[start:] if e["event"] == "refused"]


def checkpoints(running):
    return sorted((newest_run(running) / "checkpoints").glob("round-*.safetensors"))
