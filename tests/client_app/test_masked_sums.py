"""Three institutions with policies, and a coordinator that tries to learn a single adapter."""

import json
import shutil
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from chambers.in_process import InProcessGrid
from client_app import fedjudge
from client_app.audit import AuditLog
from federation.messages import (
    ARRAYS,
    AUDIT,
    CONFIG,
    IMPORTANCE,
    METRICS,
    SUM,
    Instruction,
    to_arrays,
)
from federation.run_config import parse_run_config
from federation.sums import masks
from federation.sums.announcement import ANNOUNCEMENT, GROUP, announcements_of, group_record
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import combine_digests, fingerprint
from tests.conftest import config, write_rows
from tests.sums import looks_uniform, sign_members, sums_policy

NAMES = ["alpha", "beta", "gamma"]


class Coordinator:
    """Sends arbitrary messages to three institutions, and records all replies."""

    def __init__(self, folder, checkpoint, data):
        self.folder = folder
        shutil.copytree(data, folder / "data")
        self.values = config(checkpoint, folder / "data") | {
            "state-path": str(folder / "state"),
            "sums.enabled": True,
        }
        del self.values["data.path"]
        self.replies = []
        sign_members(folder, NAMES)
        for name in NAMES:
            self.decide(name)
        settings = parse_run_config(self.values)
        self.base = combine_digests(fingerprint(checkpoint))
        state, _ = initial_adapter(str(checkpoint), settings.adapter, 0)
        self.adapter = to_arrays(state)
        self.known = {}

    def decide(self, name, policy="", only=True):
        paths = json.dumps([self.values["model.name"], str(self.folder)])
        (self.folder / f"{name}.toml").write_text(
            f"paths = {paths}\naudit-log = '{self.folder}/{name}.jsonl'\n"
            f"{policy}\n{sums_policy(self.folder, name, only)}"
        )

    def announcements(self, lineage="run"):
        """Query all institutions; return their announcements by name."""
        for name in NAMES:
            reply = self.ask("query", name, lineage=lineage)
            (self.known[name],) = announcements_of(reply.content[ANNOUNCEMENT])
        return self.known

    def ask(self, kind, name, group=None, records=None, changed=None, **instruction):
        """Send a message to an institution; ``group`` contains the announcements."""
        asked = {"round": 1, "lineage": "run", "base": self.base, "time_limit": 600.0} | instruction
        about = dict(Instruction(0, "", "", 1.0).to_record()) | asked
        content = {CONFIG: ConfigRecord(about)}
        if kind != "query":
            chosen = self.known.values() if group is None else group
            content |= {ARRAYS: self.adapter, GROUP: group_record(list(chosen))}
        node = {
            "name": name,
            "data-path": str(self.folder / "data" / name),
            "policy": str(self.folder / f"{name}.toml"),
        }
        grid = InProcessGrid(self.values | (changed or {}), {1: node})
        message = Message(RecordDict(content | (records or {})), 1, kind)
        (reply,) = grid.send_and_receive([message])
        self.replies.append(reply)
        return reply

    def refusal(self, *arguments, **keywords):
        reply = self.ask(*arguments, **keywords)
        assert reply.content.keys() - {AUDIT} == {CONFIG}
        return reply.content[CONFIG]["problem"]

    def upload(self, *arguments, **keywords):
        reply = self.ask(*arguments, **keywords)
        assert ARRAYS in reply.content, reply.content[CONFIG]
        return {name: array.numpy() for name, array in reply.content[ARRAYS].items()}

    def audit(self, name, event="reply"):
        lines = (self.folder / f"{name}.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]


@pytest.fixture
def coordinator(tmp_path, checkpoint, client_folders):
    coordinator = Coordinator(tmp_path, checkpoint, client_folders)
    coordinator.announcements()
    return coordinator


@pytest.fixture
def trained(monkeypatch):
    """Collect the adapters that clients have trained, which the coordinator must not learn."""
    adapters, train = [], fedjudge.train

    def spy(task):
        result = train(task)
        adapters.append({name: value.numpy() for name, value in result[0].items()})
        return result

    monkeypatch.setattr(fedjudge, "train", spy)
    return adapters


def weights(upload):
    return [array for name, array in upload.items() if name != masks.CHECK]


def test_only_the_sum_of_all_three_is_readable(coordinator, trained):
    uploads = [coordinator.upload("train", name) for name in NAMES]
    total = masks.sum_arrays(iter(uploads))
    assert set(total[masks.CHECK]) == {24 + 12 + 8}
    for name, received in coordinator.adapter.items():
        own = [adapter[name].astype(np.float64) for adapter in trained]
        mean = sum(w * a for w, a in zip((24, 12, 8), own, strict=True)) / 44
        change = masks.decode_update(total[name], 3, 1.0)
        np.testing.assert_allclose(received.numpy() + change, mean, atol=2e-9)
    for upload in uploads:
        assert looks_uniform(weights(upload))
    for some in (uploads[:2], uploads[1:], uploads[::2]):
        assert looks_uniform(weights(masks.sum_arrays(iter(some))))
    for reply in coordinator.replies[-3:]:
        assert set(reply.content) == {CONFIG, METRICS, ARRAYS, AUDIT}
        assert set(reply.content[METRICS]) == {"num-rows"}
        assert set(reply.content[CONFIG]) == {"name", "base", SUM}


def test_what_members_did_not_receive_alike_does_not_add_up(coordinator):
    """A different adapter, importance, round or setting for one member spoils the sum."""
    other = ArrayRecord({n: Array(a.numpy() + 1e-6) for n, a in coordinator.adapter.items()})
    ones = ArrayRecord({n: Array(np.ones_like(a.numpy())) for n, a in coordinator.adapter.items()})
    honest = [coordinator.upload("train", name, round=2) for name in NAMES[1:]]
    for difference in (
        {"records": {ARRAYS: other}},
        {"records": {IMPORTANCE: ones}},
        {"round": 1},
        {"changed": {"train.learning-rate": 1e-3}},
        {"changed": {"sums.bound": 2.0}},
        {"final": True},
    ):
        upload = coordinator.upload("train", "alpha", **({"round": 2} | difference))
        total = masks.sum_arrays(iter([upload, *honest]))
        assert set(total[masks.CHECK]) != {44}
        assert looks_uniform(weights(total))


def test_groups_that_reveal_an_update_are_refused_before_training(coordinator, trained):
    a, b, c = (coordinator.known[name] for name in NAMES)
    statement = c.statement

    def forged(**changes):
        text = statement.model_copy(update=changes).model_dump_json().encode()
        return replace(c, text=text)

    stranger = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    for group, reason in (
        ([a, b], "differs from the one in the list of groups: gamma"),
        ([a, b, b], "is named twice"),
        ([a, b, c, c], "is named twice"),
        ([a, b, forged(name="delta")], "differs from the one in the list"),
        ([a, b, forged(key=stranger)], "is not signed with the key of gamma"),
        ([a, b, forged(rows=1)], "is not signed with the key of gamma"),
        ([a, b, forged(members="0" * 64)], "is for another list of groups"),
        ([a, b, replace(c, text=b"{}")], "an announcement is malformed"),
        ([], "differs from the one in the list of groups"),
    ):
        assert reason in coordinator.refusal("train", "alpha", group=group)
    earlier = coordinator.announcements("other-run").copy()
    coordinator.announcements()
    group = [a, b, earlier["gamma"]]
    assert "is for another run" in coordinator.refusal("train", "alpha", group=group)
    assert not trained


def test_members_refuse_a_peer_that_also_sends_unmasked_adapters(coordinator, trained):
    coordinator.decide("gamma", only=False)
    coordinator.announcements()
    reason = coordinator.refusal("train", "alpha")
    assert "gamma also sends unmasked adapters (sums.only)" in reason
    assert not trained


def test_a_list_that_the_reviewer_has_not_signed_is_refused(coordinator, tmp_path):
    content = json.loads((tmp_path / "members.json").read_text())
    keys = content["groups"][0]
    for groups, reason in (
        ([{**keys, "delta": keys["gamma"]}], "two institutions have the same key"),
        ([{**keys, "Gamma": keys["gamma"]}], "names are case-insensitive"),
        ([dict(list(keys.items())[:2])], "a group has fewer than 3 institutions"),
        ([{**keys, "gamma": "ssh-rsa AAAA"}], "is not the content of its peer.pub"),
        ([{**keys, "gamma": keys["alpha"], "alpha": keys["gamma"]}], "is not signed by a reviewer"),
    ):
        (tmp_path / "members.json").write_text(json.dumps({**content, "groups": groups}))
        assert reason in coordinator.refusal("query", "alpha")
        assert reason in coordinator.refusal("train", "alpha")


def test_a_repeated_message_gets_the_same_bytes(coordinator, trained, tmp_path):
    first = coordinator.upload("train", "alpha")
    # A changed row would give another adapter, but the same masks.
    write_rows(tmp_path / "data" / "alpha" / "train.jsonl", 24, 77)
    second = coordinator.upload("train", "alpha")
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert len(trained) == 1
    assert len({line["sha256"] for line in coordinator.audit("alpha") if SUM in line}) == 1
    # Control: without the stored upload, the difference of both would be readable.
    shutil.rmtree(tmp_path / "state" / "run" / "alpha" / "sums")
    (tmp_path / "alpha.jsonl").unlink()
    third = coordinator.upload("train", "alpha")
    one, other = trained
    share, bound = 24 / 44, 1.0
    for name in one:
        difference = (third[name] - first[name]).view(np.int32) * (bound * 2.0**-30) / share
        np.testing.assert_allclose(difference, other[name] - one[name], atol=1e-7)


def test_masks_are_not_used_again_if_the_upload_is_lost(coordinator, trained, tmp_path):
    own = tmp_path / "state" / "run" / "alpha"
    shutil.copytree(own, tmp_path / "backup")
    coordinator.upload("train", "alpha")
    shutil.rmtree(own)
    shutil.copytree(tmp_path / "backup", own)
    reason = coordinator.refusal("train", "alpha")
    assert "an upload under the same masks was sent, but is no longer stored" in reason
    assert "the group has an old key" in coordinator.refusal("train", "alpha", round=2)
    before = coordinator.known["alpha"].statement.key
    assert coordinator.announcements()["alpha"].statement.key != before
    uploads = [coordinator.upload("train", name) for name in NAMES]
    assert set(masks.sum_arrays(iter(uploads))[masks.CHECK]) == {44}


def test_processes_with_the_same_message_send_one_upload(coordinator, trained):
    uploads = []

    def ask():
        uploads.append(coordinator.upload("train", "alpha"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = uploads
    assert len(trained) == 1
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_killed_client_sends_the_same_sum_or_the_same_bytes(coordinator, trained, monkeypatch):
    """End the client before training, before and after the upload is stored, and after audit."""
    expected = [coordinator.upload("train", name) for name in NAMES]
    sums = masks.sum_arrays(iter(expected))

    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    append = AuditLog.append

    def kill_after_audit(log, event, *arguments, **keywords):
        append(log, event, *arguments, **keywords)
        if event["event"] == "reply":
            raise Killed

    places = (
        ("client_app.fedjudge.train", kill),
        ("client_app.masked_sums.save_file", kill),
        ("client_app.handlers.describe_reply", kill),  # after the upload is stored
        ("client_app.audit.AuditLog.append", kill_after_audit),
    )
    for number, (place, killed) in enumerate(places):
        asked = {"lineage": f"run-{number}"}
        coordinator.announcements(**asked)
        with monkeypatch.context() as patched:
            patched.setattr(place, killed)
            with pytest.raises(Killed):
                coordinator.ask("train", "alpha", **asked)
        count = len(trained)
        uploads = [coordinator.upload("train", each, **asked) for each in NAMES]
        total = masks.sum_arrays(iter(uploads))
        assert all(np.array_equal(total[key], sums[key]) for key in sums), place
        assert len(trained) - count == (3 if number < 2 else 2), place


def test_two_runs_reveal_no_more_than_the_same_sum(coordinator, trained):
    first = [coordinator.upload("train", name) for name in NAMES]
    coordinator.announcements("again")
    second = [coordinator.upload("train", name, lineage="again") for name in NAMES]
    mixed = masks.sum_arrays(iter([first[0], second[1], second[2]]))
    assert set(mixed[masks.CHECK]) != {44}
    assert looks_uniform(weights(mixed))
    assert looks_uniform([first[0][n] - second[0][n] for n in first[0] if n != masks.CHECK])
    one, other = (masks.sum_arrays(iter(uploads)) for uploads in (first, second))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_controls_whoever_names_the_missing_learns_an_adapter(trained, coordinator):
    """Two sums with and without a member reveal it, if a protocol lets the coordinator choose."""
    for name in NAMES:
        coordinator.upload("train", name)
    sizes, received = (24, 12, 8), {n: a.numpy() for n, a in coordinator.adapter.items()}

    def summed(members, mask):
        """Sum what clients send whose masks depend on the members alone."""
        uploads = []
        for index in members:
            part = trained[index]["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
            uploads.append(masks.encode_update(sizes[index] / 44 * part, 1.0, 1.0) + mask[index])
        return sum(uploads[1:], uploads[0])

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    random, shape = np.random.default_rng(0), received[name].shape
    pairs = random.integers(0, 2**32, (3, *shape), dtype=np.uint32)
    all_three = [pairs[0] + pairs[1], pairs[2] - pairs[0], np.uint32(0) - pairs[1] - pairs[2]]
    two = [pairs[0], np.uint32(0) - pairs[0]]
    difference = summed([0, 1, 2], all_three) - summed([0, 1], two)
    found = difference.view(np.int32) * 2.0**-30 * 44 / sizes[2]
    np.testing.assert_allclose(found, trained[2][name], atol=1e-7)


def test_nothing_unmasked_leaves_a_site(coordinator, trained, tmp_path):
    for name in NAMES:
        coordinator.upload("train", name)
        coordinator.upload("evaluate", name, losses=True, importance=True, round=1)
    for kind in ("train", "evaluate"):
        reason = coordinator.refusal(kind, "alpha", changed={"sums.enabled": False})
        assert "sums.only = true" in reason
    reason = coordinator.refusal("train", "alpha", changed={"max-share": 0.9})
    assert "max-share = 0.9 (sums.max-share = 0.75)" in reason
    targets = {"adapter.targets": "embed_tokens,q_proj"}
    coordinator.decide("alpha", 'adapter-targets = ["embed_tokens", "q_proj"]')
    assert "words of one member's rows" in coordinator.refusal("query", "alpha", changed=targets)
    losses = [line for line in coordinator.replies if METRICS in line.content]
    assert all(
        set(reply.content[METRICS]) <= {"num-rows", "train-examples", "test-examples"}
        for reply in losses
    )
    sent = b"".join(
        array.data
        for reply in coordinator.replies
        for record in reply.content.array_records.values()
        for array in record.values()
    )
    for adapter in trained:
        for name, value in adapter.items():
            if "lora_B" in name:
                assert value.tobytes()[:16] not in sent


def test_values_that_are_not_finite_are_not_sent(coordinator, monkeypatch):
    train = fedjudge.train

    def diverge(task):
        adapter, metrics = train(task)
        next(iter(adapter.values())).view(-1)[0] = float("nan")
        return adapter, metrics

    monkeypatch.setattr(fedjudge, "train", diverge)
    reason = coordinator.refusal("train", "alpha")
    assert reason == "training or evaluation gave numbers that are not finite"


def test_losses_and_importance_need_the_consent_of_all(coordinator):
    asked = {"losses": True, "importance": True}
    uploads = [coordinator.upload("evaluate", name, **asked) for name in NAMES]
    assert len(uploads[0]) > 2
    coordinator.decide("gamma", "evaluation = false")
    coordinator.announcements()
    uploads = [coordinator.upload("evaluate", name, **asked) for name in NAMES]
    for upload in uploads:
        assert "sum.metrics" not in upload
        assert any("lora_B" in name for name in upload)
    counts = Counter(line.get("kind") for line in coordinator.audit("gamma"))
    assert counts["evaluate"] == 2


def test_epsilon_is_spent_once_for_an_upload(coordinator, tmp_path):
    pytest.importorskip("opacus")
    privacy = f"[privacy]\nepsilon = 100.0\naccount = '{tmp_path}/account.jsonl'\n"
    file = tmp_path / "alpha.toml"
    file.write_text(file.read_text() + privacy)
    coordinator.announcements()
    changed = {"strategy": "fedjudge-base"}
    first = coordinator.upload("train", "alpha", changed=changed)
    second = coordinator.upload("train", "alpha", changed=changed)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert len((tmp_path / "account.jsonl").read_text().splitlines()) == 1
    assert not coordinator.known["alpha"].statement.importance
    assert not coordinator.known["alpha"].statement.evaluates
