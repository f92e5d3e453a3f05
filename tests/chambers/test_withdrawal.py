"""A run that is repeated without an institution is the run that would have been."""

import hashlib
import json
import shutil

import pytest

from chambers.errors import CommandError
from chambers.in_process import InProcessGrid
from chambers.run_status import list_facts, read_run_state
from chambers.withdrawal import (
    CERTIFICATE,
    Withdraw,
    certify,
    find_descendants,
    first_round,
    prepare,
)
from federation.run_config import parse_run_config
from federation.run_folder import read_events
from finetuning.files import write_json
from server_app.checkpoint import load_run_checkpoint
from tests.marks import nightly
from tests.server_app.runs import events, final, folders, run, serve
from tests.strategies.grids import same


@pytest.fixture
def data(client_folders, tmp_path):
    """Write the rows of three clients, and without the third, gamma."""
    shutil.copytree(client_folders, tmp_path / "three")
    shutil.copytree(client_folders, tmp_path / "two", ignore=shutil.ignore_patterns("gamma"))
    return tmp_path


def settings(values, place, clients, **other):
    own = {"rounds": 3, "min-nodes": 2, "keep-rounds": "all", "data.path": str(place / clients)}
    return values | own | folders(place / f"runs-{clients}") | other


def nodes(count, of):
    return {i + 1: {"partition-id": i, "num-partitions": of} for i in range(count)}


class Joining(InProcessGrid):
    """The third client joins in round 2."""

    trained = 0

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node < 3 or self.trained]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages)
        if messages and messages[0].metadata.message_type == "train":
            type(self).trained += 1
        return replies


def without(name, old, values):
    """Prepare the run without a client; return its folder and settings."""
    found = read_events(old / "metrics.jsonl")
    new = prepare(old, parse_run_config(values), found, name)
    return new, json.loads((new / "config.json").read_text()) | {"resume": str(new)}


@pytest.mark.parametrize("strategy", ["fedjudge-base", "fedjudge-cl"])
def test_it_equals_a_run_of_the_others(values, data, strategy):
    own = settings(values, data, "three", strategy=strategy)
    old = serve(own, InProcessGrid(own, nodes(3, of=3)))
    new, changed = without("gamma", old, own)
    # A killed withdrawal is resumed like any run.
    run(changed, stop_after=(1, False), kind=lambda v, _: InProcessGrid(v, nodes(3, of=3)))
    serve(changed, InProcessGrid(changed, nodes(3, of=3)))
    other = settings(values, data, "two", strategy=strategy)
    fresh = serve(other, InProcessGrid(other, nodes(2, of=2)))
    assert same(final(new), final(fresh)) and not same(final(new), final(old))
    assert events(new) == events(fresh)
    certify(old, new, "gamma")
    certificate = json.loads((new / CERTIFICATE).read_text())
    assert certificate["rounds repeated"] == [1, 2, 3]
    assert set(certificate["participants"]["3"]) == {"alpha", "beta"}
    file = new / "adapters" / "global" / "adapter_model.safetensors"
    assert certificate["successor"]["adapter"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert certificate["run"]["lineage"] != certificate["successor"]["lineage"]
    facts = dict(list_facts(read_run_state(old)))
    assert facts["Withdrawn"] == f"gamma: use {new.name} instead"


@pytest.mark.parametrize("strategy", ["fedjudge-base", nightly("fl-glm")])
def test_rounds_before_it_joined_are_used_again(values, data, deep_checkpoint, strategy):
    values |= {"strategy": strategy, "model.name": str(deep_checkpoint)}
    own = settings(values, data, "three")
    Joining.trained = 0
    old = serve(own, Joining(own, nodes(3, of=3)))
    found = read_events(old / "metrics.jsonl")
    assert first_round(found, "gamma", parse_run_config(own)) == 2
    new, changed = without("gamma", old, own)
    assert load_run_checkpoint(new).progress.finished_rounds == 1
    serve(changed, InProcessGrid(changed, nodes(3, of=3)))
    other = settings(values, data, "two")
    fresh = serve(other, InProcessGrid(other, nodes(2, of=2)))
    assert same(final(new), final(fresh))
    certify(old, new, "gamma")
    certificate = json.loads((new / CERTIFICATE).read_text())
    assert certificate["rounds used again"] == [1]
    assert certificate["rounds repeated"] == [2, 3]


def test_a_resumed_run_goes_on_as_if_an_excluded_client_were_gone(values, data):
    own = settings(values, data, "three")
    run(own, stop_after=(1, True), kind=lambda v, _: InProcessGrid(v, nodes(3, of=3)))
    (begun,) = (data / "runs-three").iterdir()
    ends = []
    for name, exclude, count in (("excluded", "gamma", 3), ("expelled", "", 2)):
        copy = shutil.copytree(begun, data / name / begun.name)
        state = shutil.copytree(own["state-path"], data / f"{name}-state")
        changed = own | {"resume": str(copy), "exclude": exclude, "state-path": str(state)}
        ends.append(
            serve(
                changed | {"output-dir": str(data / name)},
                InProcessGrid(changed, nodes(count, of=3)),
            )
        )
    assert same(*map(final, ends))
    assert [e["participants"] for e in events(ends[0]) if e["event"] == "round"] == [
        ["alpha", "beta", "gamma"],
        ["alpha", "beta"],
        ["alpha", "beta"],
    ]


def test_what_descends_from_a_run_is_found(values, data, tmp_path):
    own = settings(values, data, "three", rounds=1)
    old = serve(own, InProcessGrid(own, nodes(3, of=3)))
    adapter, later = old / "adapters" / "global", tmp_path / "elsewhere" / "later"
    later.mkdir(parents=True)
    write_json(later / "config.json", {"initial-adapter": str(adapter)})
    for name, before in (("third", later), ("earlier", later.with_name("third"))):
        write_json(later.with_name(name) / "config.json", {"initial-adapter": str(before / "a")})
    shutil.copytree(adapter, later.with_name("copy"))
    merged = later.with_name("merged") / "README.md"
    merged.parent.mkdir()
    merged.write_text((adapter / "README.md").read_text())
    unrelated = later.with_name("unrelated") / "README.md"
    unrelated.parent.mkdir()
    unrelated.write_text("# Another adapter")
    (tmp_path / "link").symlink_to(old.parent)
    named = tmp_path / "link" / old.name
    found = "\n".join(find_descendants(named, tmp_path / "new", [later.parent]))
    for name in ("later", "third", "earlier", "copy", "merged"):
        assert str(later.with_name(name)) in found
    assert "unrelated" not in found


def test_only_a_client_that_took_part_is_withdrawn(values, data):
    own = settings(values, data, "three", rounds=1)
    old = serve(own, InProcessGrid(own, nodes(3, of=3)))
    with pytest.raises(CommandError, match="delta has taken no part in the run"):
        without("delta", old, own)
    new, _ = without("gamma", old, own)
    with pytest.raises(CommandError, match=f"gamma was withdrawn before: name --run .*{new.name}"):
        Withdraw("alpha", run=old)()


def test_lines_of_an_audit_log_do_not_count_as_taking_part(values):
    taken = [{"event": "audit", "client": "gamma", "line": 3, "digest": "0" * 64}]
    taken.append({"event": "round", "round": 2, "participants": ["gamma"]})
    assert first_round(taken, "gamma", parse_run_config(values)) == 2
