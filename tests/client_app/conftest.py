"""An institution with a policy, and a coordinator that may send arbitrary messages."""

import json
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from chambers.in_process import InProcessGrid
from federation.messages import ARRAYS, AUDIT, CONFIG, Instruction, to_arrays
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import combine_digests, fingerprint


class Site:
    """An institution with a policy."""

    def __init__(self, folder, checkpoint, data):
        self.folder, self.checkpoint, self.data = folder, checkpoint, data
        self.log = folder / "audit.jsonl"
        self.node = {"name": "court", "data-path": str(data), "policy": str(folder / "policy.toml")}
        self.values = {
            "strategy": "fedjudge-cl",
            "rounds": 3,
            "model.name": str(checkpoint),
            "adapter.targets": "q_proj",
            "state-path": str(folder / "state"),
        }

    def decide(self, policy=""):
        folders = json.dumps([str(self.checkpoint.parent), str(self.folder)])
        start = f'audit-log = "{self.log}"\npaths = {folders}\n'
        Path(self.node["policy"]).write_text(start + policy)

    def ask(self, kind, records=None, changed=None, **instruction):
        """Send a message; ``changed`` contains the run config's changed settings."""
        return self.send(self.message(kind, records, **instruction), changed)

    def send(self, message, changed=None, node=1):
        grid = InProcessGrid(self.values | (changed or {}), {node: self.node})
        message.metadata.dst_node_id = node  # a sender can write any value
        (reply,) = grid.send_and_receive([message])
        return reply

    def message(self, kind, records=None, **instruction):
        base = combine_digests(fingerprint(self.checkpoint))
        asked = {"round": 1, "lineage": "run-1", "base": base, "time_limit": 600.0} | instruction
        about = dict(Instruction(0, "", "", 1.0).to_record()) | asked
        content = {CONFIG: ConfigRecord(about)}
        if kind != "query":
            settings = parse_run_config(self.values).adapter
            state, _ = initial_adapter(str(self.checkpoint), settings, 0)
            content[ARRAYS] = to_arrays(state)
        TaskIdentity.run_id = TaskIdentity.task_id = 1
        TaskIdentity.node_id = 0
        return Message(RecordDict(content | (records or {})), 1, kind)

    def refusal(self, *arguments, **instruction):
        """Send a message that must be refused; return the reason."""
        return self.problem(self.ask(*arguments, **instruction))

    @staticmethod
    def problem(reply):
        assert reply.content.keys() - {AUDIT} == {CONFIG}  # nothing else was sent
        assert set(reply.content[CONFIG]) == {"name", "problem"}
        return reply.content[CONFIG]["problem"]

    def lines(self, event):
        text = self.log.read_text() if self.log.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [line for line in found if line["event"] == event]


@pytest.fixture
def site(tmp_path, checkpoint, client_folders):
    site = Site(tmp_path, checkpoint, client_folders / "alpha")
    site.decide()
    return site
