"""An institution with a policy, and a coordinator that may send it anything."""

import json
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from bench.in_process import InProcessGrid
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import digest, fingerprint
from strategies.messages import ARRAYS, CONFIG, Instruction, to_arrays
from strategies.run_config import parse_run_config


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
        """Send a message; ``changed`` is the run config's part that differs."""
        values = self.values | (changed or {})
        base = digest(fingerprint(self.checkpoint))
        asked = {"round": 1, "lineage": "run-1", "base": base, "time_limit": 600.0} | instruction
        about = dict(Instruction(0, "", "", 1.0).to_record()) | asked
        content = {CONFIG: ConfigRecord(about)}
        if kind != "query":
            settings = parse_run_config(self.values).adapter
            state, _ = initial_adapter(str(self.checkpoint), settings, 0)
            content[ARRAYS] = to_arrays(state)
        grid = InProcessGrid(values, {1: self.node})
        (reply,) = grid.send_and_receive([Message(RecordDict(content | (records or {})), 1, kind)])
        return reply

    def refusal(self, *arguments, **instruction):
        """Send a message; return why it is refused."""
        reply = self.ask(*arguments, **instruction)
        assert set(reply.content) == {CONFIG}  # nothing else has left
        assert set(reply.content[CONFIG]) == {"name", "problem"}
        return reply.content[CONFIG]["problem"]

    def lines(self, event):
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in found if line["event"] == event]


@pytest.fixture
def site(tmp_path, checkpoint, client_folders):
    site = Site(tmp_path, checkpoint, client_folders / "alpha")
    site.decide()
    return site
