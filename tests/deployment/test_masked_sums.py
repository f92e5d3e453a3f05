"""Masked sums over TLS: killed programs, and lists and policies that differ, with three hosts."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.conftest import write_checkpoint, write_rows
from tests.deployment.conftest import contains, results
from tests.deployment.deployment import COMPLETED, deployment
from tests.deployment.faults import newest_run, resume, wait_for_end
from tests.deployment.hosts import FOLDER
from tests.deployment.supervisor import supervised
from tests.server_app.runs import final
from tests.strategies.grids import same
from tests.sums import sign_members
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


def trainings(host):
    log = host.folder / "state" / ".local" / "state" / "chambers" / "audit.jsonl"
    return log.read_text().count('"event": "accepted"') if log.exists() else 0


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
