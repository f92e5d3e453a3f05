"""A site whose disk is full: its client is left out with a reason, and later takes part again."""

import json

from chambers.in_process import InProcessGrid
from federation.messages import ARRAYS
from tests.conftest import fill
from tests.in_process import run_in_process

BLOCK = 4096  # bytes


def test_a_round_that_cannot_be_kept_is_explained(site, small_disk):
    quick = {"train.local-steps": 1, "state-path": str(small_disk / "state")}
    assert ARRAYS in site.ask("train", changed=quick).content
    (own,) = (small_disk / "state").glob("*/court")
    kept = {path: path.read_bytes() for path in own.rglob("*.safetensors")}
    fill(small_disk)
    problem = site.refusal("train", changed=quick, round=2)
    assert problem == f"no space is left on the disk of {own}: free some space"
    assert {path: path.read_bytes() for path in own.rglob("*.safetensors")} == kept
    assert [path.name for path in own.iterdir()] == ["round-0001"]
    (small_disk / "ballast").unlink()
    assert ARRAYS in site.ask("train", changed=quick, round=2).content


class Filling(InProcessGrid):
    """Fills the disk of a site's audit log before a training round, and frees space afterwards."""

    def __init__(self, values, nodes, log, full_round):
        super().__init__(values, nodes)
        self._log, self._full_round = log, full_round
        self.before = b""

    def push_messages(self, messages):
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            (self._log.parent / "ballast").unlink(missing_ok=True)
            if messages[0].content["config"]["round"] == self._full_round:
                with self._log.open("ab") as lines:
                    lines.write(b"\n" * (-self._log.stat().st_size % BLOCK))
                self.before = self._log.read_bytes()
                fill(self._log.parent)
        return super().push_messages(messages)


def test_a_full_audit_log_leaves_a_site_out(values, small_disk, client_folders, tmp_path):
    log, policy = small_disk / "audit.jsonl", tmp_path / "policy.toml"
    folders = json.dumps([values["model.name"], str(tmp_path)])
    policy.write_text(f'audit-log = "{log}"\npaths = {folders}\n')
    del values["data.path"]
    values |= {"strategy": "fedjudge-base", "min-nodes": 1, "train.local-steps": 1}
    values |= {"evaluate.every": 3, "state-path": str(tmp_path / "state")}
    nodes = {
        1: {"name": "court", "data-path": str(client_folders / "alpha"), "policy": str(policy)},
        2: {"name": "consultation", "data-path": str(client_folders / "beta")},
    }
    grid = Filling(values, nodes, log, full_round=2)
    journal = run_in_process(values, tmp_path / "state", 2, grid)
    rounds = [event for event in journal.events if event["event"] == "round"]
    both = ["consultation", "court"]
    assert [event["participants"] for event in rounds] == [both, both[:1], both]
    (left_out,) = rounds[1]["left_out"]
    reason = "nothing leaves this site, because its audit log can't be written"
    assert left_out == {"client": "court", "reason": f"{reason}: No space left on device ({log})"}
    # The log contains nothing about the second round.
    lines = log.read_bytes().removeprefix(grid.before).splitlines()
    assert {json.loads(line)["round"] for line in lines} == {3}
