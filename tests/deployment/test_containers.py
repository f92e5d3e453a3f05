"""The image and the Compose files of ``docker/``, on a container engine."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import write_checkpoint, write_rows
from tests.deployment.deployment import CHECKOUT
from tests.deployment.engine import make_bases, missing, running_engine
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
INSTITUTIONS = ("court", "consultation")
PARTIES = ("coordinator", *INSTITUTIONS)
SECONDS = 600.0
# The SuperLink's port has no authentication; see docker/coordinator.yml.
CONNECT = "import socket; socket.create_connection(('198.51.100.2', 8000), timeout=5)"


class Containers:
    """The containers that ``docker/trial.sh`` starts, with a project of Compose for each party.

    Attributes:
        engine: The container engine.
        folder: The folder ``docker`` of a copy of the checkout.

    """

    def __init__(self, engine, folder):
        self.engine, self.folder = engine, folder

    def compose(self, party, *words):
        return self.engine.docker("compose", "--project-name", f"chambers-{party}", *words)

    def ids(self):
        """Return the ids of the services' containers, including those that have ended."""
        label = "com.docker.compose"
        words = ("--all", "--filter", f"label={label}.oneoff=False")
        shown = f'{{{{.Label "{label}.project"}}}}-{{{{.Label "{label}.service"}}}} {{{{.ID}}}}'
        listing = self.engine.docker("ps", *words, "--format", shown)
        return dict(line.removeprefix("chambers-").split() for line in listing.splitlines())

    def state(self, name):
        return json.loads(self.engine.docker("inspect", "--format", "{{json .State}}", name))

    def coordinator(self, *words):
        """Run ``chambers`` in the coordinator's folder, as docs/deployment.md describes."""
        mount = ("--volume", f"{self.folder}/coordinator:/srv/chambers")
        command = ("--entrypoint", "chambers", "superexec", *words)
        options = ("--file", "coordinator.yml", "run", "--rm", "--no-TTY", *mount)
        return self.engine.docker("compose", *options, *command, folder=self.folder)

    def wait_until_ready(self):
        """Wait until all containers are healthy, the proxy answers, and SuperNodes are online."""
        wait_until(lambda: set(self.health()) == {"healthy"}, SECONDS, self.seen)
        wait_until(self.reachable, SECONDS, self.seen)
        wait_until(self.online, SECONDS, self.seen)

    def health(self):
        return [self.state(one).get("Health", {}).get("Status") for one in self.ids().values()]

    def reachable(self):
        """Ask the proxy at its published port."""
        words = "curl --silent --cacert coordinator/authority.pem https://localhost:8443/health"
        command = ("sh", "-c", f"{words} --fail > /dev/null && echo reached || true")
        return self.engine.run(*command, folder=self.folder) == "reached\n"

    def online(self):
        return self.coordinator("site", "nodes").count(" online ") == len(INSTITUTIONS)

    def allow_split_learning(self):
        for name in INSTITUTIONS:
            policy = self.folder / name / "policy.toml"
            # A file that is mounted must be changed in place.
            policy.write_text(policy.read_text().replace("allowed = false", "allowed = true"))

    def seen(self):
        asked = [("ps", "--all"), ("logs", "--tail", "10")]
        return "".join(self.compose(party, *words) for party in PARTIES for words in asked)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    if reason := missing():
        pytest.skip(f"no container engine: {reason}")
    cache = os.environ.get("CHAMBERS_CACHE") or tmp_path_factory.mktemp("cache")
    with running_engine(Path(cache).absolute() / "containers") as engine:
        files = [CHECKOUT / "docker" / "Dockerfile", *(CHECKOUT / "docker").glob("*.yml")]
        text = "".join(file.read_text() for file in files)
        (nginx,) = set(re.findall(r"image: (nginx:\S+)", text))
        flower = sorted(set(re.findall(r"(?:image: |FROM )(flwr/\S+)", text)))
        make_bases(engine, Path(cache).absolute() / "containers", nginx, flower)
        yield engine


@pytest.fixture(scope="module")
def checkout(engine, tmp_path_factory):
    """Copy ``docker/`` and the files that the image is built from."""
    copy = tmp_path_factory.mktemp("checkout")
    names = re.findall(r"^!(\w\S+)$", (CHECKOUT / ".dockerignore").read_text(), re.MULTILINE)
    trial = shutil.ignore_patterns("__pycache__", "coordinator", *INSTITUTIONS, ".env")
    for name in (".dockerignore", *names):
        if (CHECKOUT / name).is_file():
            shutil.copy(CHECKOUT / name, copy)
        else:
            shutil.copytree(CHECKOUT / name, copy / name, ignore=trial)
    return copy


@pytest.fixture(scope="module")
def containers(engine, checkout):
    """Set up a trial on one machine with docker/trial.sh, which ends with a run."""
    docker = checkout / "docker"
    for seed, name in enumerate(INSTITUTIONS):
        write_rows(docker / name / "data" / "train.jsonl", 12, seed)
        write_rows(docker / name / "data" / "test.jsonl", 4, 100 + seed)
    model = write_checkpoint(docker / "model", blocks=4)
    for file in model.iterdir():
        file.chmod(0o644)
    engine.run("docker/trial.sh", folder=checkout, variables={"MODEL": str(model)})
    containers = Containers(engine, docker)
    yield containers
    for party in PARTIES:
        containers.compose(party, "down", "--timeout", "1")


def test_each_method_runs_and_the_engine_restarts(containers):
    """The script ends with the first run."""
    containers.wait_until_ready()
    before = containers.ids()
    containers.engine.stop()
    containers.engine.start()
    containers.wait_until_ready()
    assert containers.ids() == before
    containers.allow_split_learning()
    containers.coordinator("run", "run.toml", 'strategy="fl-glm"', "train.local-steps=2")


@pytest.mark.parametrize(
    "service",
    [f"coordinator-{name}" for name in ("superlink", "superexec", "proxy")]
    + ["court-supernode", "court-superexec"],
)
def test_a_program_that_ends_alone_returns(containers, service):
    containers.wait_until_ready()
    container = containers.ids()[service]
    before = containers.state(container)
    os.kill(before["Pid"], signal.SIGKILL)
    wait_until(lambda: containers.state(container)["StartedAt"] != before["StartedAt"], SECONDS)
    containers.wait_until_ready()


def test_only_its_companions_reach_the_superlink(containers):
    """Neither do users of the machine, nor other containers."""
    containers.wait_until_ready()
    words = ("python", "-c", CONNECT)
    ids = containers.ids()
    containers.engine.docker("exec", ids["coordinator-superexec"], *words)
    assert "OSError" in containers.engine.run(*words, status=1)
    said = containers.engine.run("docker", "exec", ids["court-superexec"], *words, status=1)
    assert "Error" in said


@pytest.mark.parametrize("path", ["model", "data", "policy.toml"])
def test_a_missing_path_is_refused_and_not_created(containers, tmp_path, path):
    folder = containers.folder / "court"
    absent = tmp_path / "absent"
    variables = {
        "COORDINATOR": "coordinator:8443",
        "INSTITUTION": "third",
        "FOLDER": str(absent if path == "policy.toml" else folder),
        "MODEL": str(absent if path == "model" else containers.folder / "model"),
        "DATA": str(absent if path == "data" else folder / "data"),
    }
    words = ("docker", "compose", "--file", "institution.yml", "up", "--detach", "superexec")
    try:
        said = containers.engine.run(
            *words, folder=containers.folder, variables=variables, status=1
        )
        assert str(absent) in said
        assert not absent.exists()
    finally:
        containers.engine.run(*words[:4], "down", folder=containers.folder, variables=variables)


def test_a_change_of_the_code_renews_only_the_last_layer(engine, checkout):
    """The image has neither Ray nor tests, and no sources beside the installed package."""

    def layers():
        engine.docker(
            "build", "--file", "docker/Dockerfile", "--tag", "changed", ".", folder=checkout
        )
        return json.loads(
            engine.docker("inspect", "--format", "{{json .RootFS.Layers}}", "changed")
        )

    before = layers()
    with (checkout / "chambers" / "__main__.py").open("a") as code:
        code.write("# A change.\n")
    after = layers()
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    look = "find /python -path '*/site-packages/ray' -o -name tests -type d; ls -A /app"
    assert not engine.docker("run", "--rm", "--entrypoint", "sh", "changed", "-c", look)
