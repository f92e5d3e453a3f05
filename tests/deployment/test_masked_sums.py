"""Masked sums over TLS: killed programs, and lists and policies that differ, with three hosts."""

import json
import shutil

import pytest
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from client_app.audit import AuditLog
from federation.messages import SUM
from federation.sums.masks import CHECK, sum_arrays
from tests.conftest import write_checkpoint, write_rows
from tests.deployment import dishonest
from tests.deployment.conftest import contains, results
from tests.deployment.deployment import COMPLETED, deployment
from tests.deployment.dishonest import CLIENT_STEPS, SERVER_STEPS
from tests.deployment.faults import newest_run, resume, wait_for_end
from tests.deployment.hosts import FOLDER
from tests.deployment.program import other_program
from tests.deployment.supervisor import supervised
from tests.server_app.runs import final
from tests.strategies.grids import same
from tests.sums import looks_uniform, sign_members
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly
SIZES = {"court": 16, "consultation": 8, "hospital": 12}
SETTINGS = {
    "strategy": "fedjudge-cl",
    "rounds": 2,
    "max-share": 0.5,
    "sums.enabled": True,
    "train.local-steps": 60,
    "train.batch-size": 2,
    "train.accumulation": 1,
    "continual.importance-examples": 4,
    "round-timeout": 240.0,
    "node-timeout": 60.0,
}
SHORT = SETTINGS | {"rounds": 1, "train.local-steps": 4}


@pytest.fixture(scope="module")
def summing(nginx, tmp_path_factory):
    """Start a coordinator and three institutions that allow only masked sums."""
    folder, data = tmp_path_factory.mktemp("hosts"), tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate(SIZES.items()):
        write_rows(data / name / "train.jsonl", count, seed)
        write_rows(data / name / "test.jsonl", 4, 100 + seed)
    model = write_checkpoint(tmp_path_factory.mktemp("model"), blocks=2)
    keys = tmp_path_factory.mktemp("keys")
    sign_members(keys, list(SIZES))
    with deployment(folder, {name: data / name for name in SIZES}, model) as running:
        for host in running.hosts.values():
            sums = host.folder / "sums"
            sums.mkdir(exist_ok=True)
            shutil.copy(keys / "members.json", sums)
            if host.name in SIZES:
                shutil.copy(keys / f"{host.name}-peer", sums / "peer")
                trusted = host.folder / "trusted.yaml"
                trusted.write_text(trusted.read_text() + (keys / "trusted.yaml").read_text())
                policy = host.folder / "policy.toml"
                policy.write_text(policy.read_text() + host.here(table(only=True)))
        coordinator = running.hosts["coordinator"]
        running.settings["sums.members"] = coordinator.here(f"{FOLDER}/sums/members.json")
        yield running


def table(only):
    return (
        f"[sums]\nonly = {str(only).lower()}\nmembers = '{FOLDER}/sums/members.json'\n"
        f"reviewers = '{FOLDER}/trusted.yaml'\nkey = '{FOLDER}/sums/peer'\n"
    )


def rounds(running):
    file = results(running) / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "round"]


def audited(host):
    return AuditLog(host.folder / "state" / ".local" / "state" / "chambers" / "audit.jsonl").lines()


def trainings(host):
    return sum(line["event"] == "accepted" for line in audited(host))


def program(running, host, folder, name):
    """Use a program of dishonest.py on a host; return the file that tells it what to do."""
    folder.mkdir(exist_ok=True)
    superexec, order = running.programs[host]["superexec"], f"{FOLDER}/state/order"
    own = superexec.host.here(order)
    return other_program(superexec, folder, name, dishonest.__file__, name, own)


def order(running, host):
    return running.hosts[host].folder / "state" / "order"


def test_killed_programs_change_nothing_and_reveal_no_adapter(summing):
    status, log = summing.run(SETTINGS)
    assert status == COMPLETED, log
    unbroken = final(results(summing))
    supernode, court = summing.programs["court"]["supernode"], summing.hosts["court"]
    # Kill an institution's SuperNode while it trains; without it, its group takes no part.
    accepted, before = trainings(court), newest_run(summing)
    summing.submit(SETTINGS)
    wait_until(lambda: newest_run(summing) != before and trainings(court) > accepted + 1, 600.0)
    supernode.kill()
    assert "0 valid replies, but min-nodes = 3 are required" in wait_for_end(summing)
    assert resume(summing, SETTINGS) == COMPLETED
    assert [event["round"] for event in rounds(summing)] == [1, 2]
    assert same(unbroken, final(results(summing)))
    # Kill the coordinator's ServerApp after round 1.
    before = newest_run(summing)
    summing.submit(SETTINGS)
    wait_until(lambda: newest_run(summing) != before and rounds(summing), 600.0)
    with supervised(summing, "ServerApp", 0.0):
        assert "failed" in wait_for_end(summing)
    assert resume(summing, SETTINGS) == COMPLETED
    assert same(unbroken, final(results(summing)))
    trained = [
        value.numpy().tobytes()
        for name in SIZES
        for file in (summing.hosts[name].folder / "state").rglob("round-*/adapter.safetensors")
        for key, value in load_file(file).items()
        if "lora_B" in key
    ]
    assert trained
    files = [f for f in summing.hosts["coordinator"].folder.rglob("*") if f.is_file()]
    content = b"".join(file.read_bytes() for file in files)
    assert not any(value[:32] in content for value in trained)


def test_the_coordinator_sees_which_groups_are_complete(summing):
    beside = summing.programs["coordinator"]["superexec"]
    command = ["chambers", "site", "nodes", "--folder", beside.host.here(FOLDER)]
    listed = beside.host.run(command, beside.view).stdout
    assert "group 1 (consultation, court, hospital) is complete" in listed, listed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("list", "is not signed by a reviewer"),
        ("only", "also sends unmasked adapters (sums.only)"),
        ("plain", "a run with sums.enabled = false (sums.only = true)"),
    ],
)
def test_what_differs_at_one_institution_stops_the_run(summing, change, reason):
    court = summing.hosts["court"].folder
    members, policy = court / "sums" / "members.json", court / "policy.toml"
    before = members.read_text(), policy.read_text()
    if change == "list":
        content = json.loads(before[0])
        keys = content["groups"][0]
        keys["court"], keys["hospital"] = keys["hospital"], keys["court"]
        members.write_text(json.dumps(content))
    if change == "only":
        policy.write_text(before[1].replace("only = true", "only = false"))
    try:
        status, log = summing.run(
            SETTINGS
            | {"sums.enabled": change != "plain", "rounds": 1}
            | ({"sums.members": ""} if change == "plain" else {})
        )
    finally:
        members.write_text(before[0])
        policy.write_text(before[1])
    assert status != COMPLETED
    contains(log, reason)


def test_programs_killed_at_any_step_change_nothing(summing, tmp_path):
    status, log = summing.run(SHORT)
    assert status == COMPLETED, log
    unbroken = final(results(summing))
    with (
        program(summing, "court", tmp_path / "court", "flwr-clientapp"),
        program(summing, "coordinator", tmp_path / "coordinator", "flwr-serverapp"),
    ):
        for host, steps in (("court", CLIENT_STEPS), ("coordinator", SERVER_STEPS)):
            for step in steps:
                order(summing, host).write_text(step)
                summing.submit(SHORT)
                assert "failed" in wait_for_end(summing), step
                assert not order(summing, host).exists(), step
                assert resume(summing, SHORT) == COMPLETED, step
                assert same(unbroken, final(results(summing))), step


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("key", "is not signed with the key of hospital"),
        ("without", "differs from the one in the list of groups: hospital"),
        ("adapter", "its members have not received the same, or one has sent a wrong upload"),
    ],
)
def test_a_malicious_coordinator_opens_no_sum(summing, tmp_path, attack, reason):
    file = order(summing, "coordinator")
    with program(summing, "coordinator", tmp_path, "flwr-serverapp"):
        file.write_text(attack)
        status, log = summing.run(SHORT)
        file.unlink()
    assert status != COMPLETED
    contains(log, reason)
    transcript = file.with_name(dishonest.TRANSCRIPT)
    uploads = [load_arrays(each) for each in transcript.iterdir()]
    shutil.rmtree(transcript)
    assert len(uploads) == (3 if attack == "adapter" else 2)
    for upload in (*uploads, sum_arrays(iter(uploads))):
        assert looks_uniform(value for name, value in upload.items() if name != CHECK)


def test_a_repeated_message_gets_the_same_upload(summing, tmp_path):
    """The coordinator sends the first institution's message twice."""
    file, first = order(summing, "coordinator"), summing.hosts["consultation"]
    before = len(list(audited(first)))
    with program(summing, "coordinator", tmp_path, "flwr-serverapp"):
        file.write_text("twice")
        status, log = summing.run(SHORT)
        file.unlink()
    assert status == COMPLETED, log
    lines = [line for line in list(audited(first))[before:] if line["kind"] == "train"]
    sent = [(line[SUM], line["sha256"]) for line in lines if line["event"] == "reply"]
    assert len(sent) == 2
    assert len(set(sent)) == 1
