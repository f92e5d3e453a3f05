"""Files that a run writes contain no text of the clients and no secret of a lane."""

import base64
import json
from pathlib import Path

import pytest

from chambers.in_process import InProcessGrid
from federation.messages import LANE, invitation_of
from tests.server_app.runs import folders, serve

WORD = "quixotry"  # occurs in the clients' texts


class Overhearing(InProcessGrid):
    """Records the secrets of the tickets that are sent to clients."""

    def __init__(self, values, nodes):
        super().__init__(values, nodes)
        self.secrets = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            if LANE in message.content.config_records:
                self.secrets.append(invitation_of(message).ticket.secret)
        return super().send_and_receive(messages, timeout=timeout)


def files_with(folder: Path, content: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


@pytest.mark.parametrize("strategy", ["fedjudge-cl", "fl-glm"])
def test_neither_text_nor_tickets_are_on_a_disk_after_a_run(
    values, deep_checkpoint, tmp_path, strategy
):
    for name in ("alpha", "beta"):
        for part in ("train", "test"):
            write_marked(tmp_path / "data" / name / f"{part}.jsonl")
    values |= {
        "strategy": strategy,
        "model.name": str(deep_checkpoint),
        "data.path": str(tmp_path / "data"),
        **folders(tmp_path / "runs"),
        "min-nodes": 2,
        "rounds": 1,
        "train.local-steps": 1,
        "evaluate.generate": True,
        "evaluate.max-new-tokens": 2,
    }
    nodes = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    grid = Overhearing(values, nodes)
    serve(values, grid)
    assert len(files_with(tmp_path / "data", WORD.encode())) == 4
    for folder in (tmp_path / "runs", tmp_path / "runs-state"):
        assert list(folder.rglob("adapter_model.safetensors"))
        assert not files_with(folder, WORD.encode())
    assert len(grid.secrets) == (0 if strategy == "fedjudge-cl" else 6)
    for secret in grid.secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)):
            assert not files_with(tmp_path, form)


def write_marked(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    row = {"instruction": "Repeat", "input": f"the {WORD}", "output": WORD}
    file.write_text(f"{json.dumps(row)}\n" * 4)
