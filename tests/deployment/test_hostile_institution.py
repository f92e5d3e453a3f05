"""A registered institution, the consultation, attacks the coordinator and the court."""

import base64
import json
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64

from federation.messages import CONFIG, Instruction
from federation.run_folder import METRICS_FILE, read_events
from tests.deployment.deployment import CHECKOUT, COMPLETED
from tests.deployment.faults import newest_run, wait_for_end
from tests.deployment.greedy import BYTES
from tests.deployment.program import other_program
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
        """Send messages with the consultation's key; return the answers.

        With ``announce``, announce these objects as the content of the last message. They have
        children that never come.
        """
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
        return json.loads(said.splitlines()[-1])


def events(running, kind):
    return [e for e in read_events(newest_run(running) / METRICS_FILE) if e["event"] == kind]


def accepted(court):
    return [e for e in audited(court) if (e["event"], e["kind"]) == ("accepted", "train")]


@pytest.mark.nightly
def test_nobody_speaks_in_the_name_of_another(running):
    """Nor delays others, nor fills the database: only an institution's own replies are stored."""
    court, before = running.hosts["court"], newest_run(running)
    audit, seen = len(audited(court)), len(accepted(court))
    attack = Attack(running, running.submit(SETTINGS))
    coordinator, target, own = COORDINATOR, attack.nodes["court"], attack.nodes["consultation"]
    wait_until(lambda: newest_run(running) != before, SECONDS)
    wait_until(lambda: accepted(court)[seen:], SECONDS)
    ((asked,),) = attack.query(
        "SELECT message_id FROM message_ins WHERE dst_node_id = ? AND message_type LIKE 'train%'",
        (uint64_to_int64(target),),
    )
    content = RecordDict({CONFIG: Instruction(9, "run", "", 60.0, final=True).to_record()})
    problem = RecordDict({CONFIG: ConfigRecord({"name": "court", "problem": "out of memory"})})
    messages = {
        "an instruction": attack.message("evaluate", content, coordinator, target),
        "a message of its own": attack.message("query", content, own, target),
        "a message to itself": attack.message("query", content, own, own),
        "a reply in the court's name": attack.message("train", problem, target, coordinator, asked),
        "a reply to another institution": attack.message("train", problem, own, target, asked),
        "objects that never come": attack.message("query", content, coordinator, target),
    }
    answers = attack.send(*messages.values(), announce=["1" * 64])
    for name, said in zip(messages, answers, strict=True):
        assert said.startswith("400") and f"node {own} sent a message" in said, name
    # The SuperLink ignores a reply to a message that was not for its sender.
    assert attack.send(attack.message("train", problem, own, coordinator, asked)) == ["stored"]
    log = running.programs["coordinator"]["superlink"].output()
    address = running.hosts["consultation"].address
    assert log.count(f"refused a message from {address}: node {own} sent") >= len(messages)

    assert wait_for_end(running) == COMPLETED
    assert not refusals(court, audit)
    rounds = events(running, "round")
    assert [each["left_out"] for each in rounds] == [[]] * len(rounds)
    assert [each["participants"] for each in rounds] == [["consultation", "court"]] * len(rounds)


@pytest.mark.nightly
def test_a_spoiled_reply_is_left_out_or_scaled_down(running, tmp_path):
    """The consultation fills the memory twice, then sends far weights; it claims 10⁹ rows."""
    settings = SETTINGS | {"train.local-steps": 1, "evaluate.every": 3}
    before = newest_run(running)
    superexec = running.programs["consultation"]["superexec"]
    with other_program(superexec, tmp_path, "flwr-clientapp", str(GREEDY)):
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
    factors = {e["what"]: e["factor"] for e in events(running, "scaled")}
    # The court has 16 rows, so of the claimed ones, three times as many count.
    assert factors["data size"] == 48 / 10**9 and factors["update"] < 0.01
    assert peak < BYTES / 2


def max_memory(running):
    """Return the peak memory, in bytes, of the run's ServerApp so far."""
    processes = running.programs["coordinator"]["superexec"].processes()
    states = [Path(f"/proc/{each.pid}/status").read_text() for each in processes]
    (state,) = (state for state in states if state.startswith("Name:\tflwr-serverapp"))
    (line,) = (line for line in state.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def refusals(court, start):
    return [e["problem"] for e in audited(court)[start:] if e["event"] == "refused"]
