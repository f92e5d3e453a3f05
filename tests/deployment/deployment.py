"""A coordinator and institutions on one machine, set up as in ``docs/deployment.md``."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from chambers.site.authority import check_names, open_authority
from chambers.site.keys import open_instructions, open_node_key
from federation.run_config import Scalar
from tests.deployment.compose import read_services
from tests.deployment.hosts import FOLDER, Host, network
from tests.deployment.program import CHECKOUT, DeploymentError, Program
from tests.site_files import write_site

COMPLETED = "finished:completed"
RELEASE = "@chambers/chambers==0.1.0"
_DOCKER = CHECKOUT / "docker"
_ACTIVE_SECONDS = 120.0
_RUN_SECONDS = 900.0


class Deployment:
    """The hosts and programs of a deployment.

    Attributes:
        hosts: Hosts by name: ``"coordinator"`` and the institutions.
        programs: For each host, its programs by the service's name in ``docker/``: ``"superlink"``,
            ``"superexec"`` and ``"proxy"``, or ``"supernode"``, ``"superexec"`` and perhaps
            ``"worker"``.
        institutions: Names of the institutions.
        address: Address of the proxy.
        settings: The part of the run config that depends on the deployment.

    """

    def __init__(
        self, hosts: Mapping[str, Host], data: Mapping[str, Path], model: Path, worker: bool
    ) -> None:
        coordinator = hosts["coordinator"]
        self.hosts = dict(hosts)
        self.programs: dict[str, dict[str, Program]] = {}
        self.institutions = list(data)
        self._worker = worker
        self.address = f"{coordinator.address}:8443"
        # Containers have the model at the same path on every host.
        self.settings: dict[str, Scalar] = {
            "model.name": f"{FOLDER}/model" if coordinator.namespace else str(model),
            "min-nodes": len(data),
            "split.listen": f"{coordinator.address}:9000",
            "instruction-key": coordinator.here(f"{FOLDER}/instructions.key"),
        }
        self._prepare_coordinator(coordinator, model)
        for name, folder in data.items():
            self._prepare_institution(hosts[name], folder, model)

    def start(self) -> None:
        """Start the coordinator, register the institutions, and start them.

        Raises:
            DeploymentError: A program or command failed.

        """
        coordinator = self.programs["coordinator"]
        for program in coordinator.values():
            program.start()
        # The proxy's health check succeeds only once the SuperLink answers.
        for name in ("proxy", "superexec"):
            coordinator[name].wait_until_ready()
        for name in self.institutions:
            self.register(name, self.hosts[name].folder / "node.pub")
            for program in self.programs[name].values():
                program.start()
        for name in self.institutions:
            self.wait_until_active(name)

    def wait_until_active(self, name: str, times: int = 1) -> None:
        """Wait until the SuperLink has accepted an institution's SuperNode ``times`` times.

        Raises:
            DeploymentError: The SuperNode has ended, or isn't accepted in time.

        """
        supernode = self.programs[name]["supernode"]
        end = time.monotonic() + _ACTIVE_SECONDS
        while supernode.output().count("SuperNode ID: ") < times:
            if time.monotonic() > end or not supernode.running:
                raise DeploymentError(f"{supernode} is not active:\n{supernode.output()[-2000:]}")
            time.sleep(0.2)

    def register(self, name: str, key: Path) -> None:
        """Register the public key of an institution's SuperNode."""
        # The coordinator's programs see only files in its folder.
        shutil.copy(key, self.hosts["coordinator"].folder / "state" / f"{name}.pub")
        self.flwr("supernode", "register", f"state/{name}.pub", "deployment", "--name", name)

    def flwr(self, *arguments: str, seconds: float = 120.0) -> str:
        """Run ``flwr`` at the coordinator, and return its output.

        Raises:
            DeploymentError: The command failed.

        """
        beside = self.programs["coordinator"]["superexec"]
        result = beside.host.run(["flwr", *arguments], beside.view, seconds)
        if result.returncode != 0:
            raise DeploymentError(f"flwr {' '.join(arguments)}: {result.stdout}")
        return result.stdout

    def submit(self, config: Mapping[str, Scalar], app: str = RELEASE) -> int:
        """Submit a run of the release, or of a different app, and return the run's id."""
        return int(json.loads(self._run(config, app, "--format=json"))["run-id"])

    def run(self, config: Mapping[str, Scalar], app: str = RELEASE) -> tuple[str, str]:
        """Run the release, or a different app, to the end; return the run's status and log."""
        log = self._run(config, app, "--stream")
        return self.status(), log

    def status(self) -> str:
        """Return the status of the newest run, with the reason if it failed.

        Raises:
            DeploymentError: The SuperLink can't be queried.

        """
        listing = self.flwr("ls", "deployment", "--format=json")
        runs = json.loads(listing).get("runs")
        if not runs:  # the exit status is 0 even if the SuperLink can't be reached
            raise DeploymentError(f"the SuperLink lists no run: {listing}")
        newest = runs[0]
        status, details = str(newest["status"]), str(newest.get("status-details", ""))
        return status if details in {"", "N/A"} else f"{status}: {details}"

    def stop(self) -> None:
        """Stop all programs, those of institutions first."""
        for programs in reversed(self.programs.values()):
            for program in programs.values():
                program.stop()

    def _run(self, config: Mapping[str, Scalar], app: str, *options: str) -> str:
        values = self.settings | dict(config)
        file = self.hosts["coordinator"].folder / "state" / "run.toml"
        file.write_text("".join(f"{key} = {json.dumps(values[key])}\n" for key in values))
        command = ("run", app, "deployment", "--run-config", "state/run.toml", *options)
        return self.flwr(*command, seconds=_RUN_SECONDS)

    def _prepare_coordinator(self, host: Host, model: Path) -> None:
        names = list(dict.fromkeys((host.address, host.loopback)))
        open_authority(host.folder).issue(host.folder, check_names(names), 365)
        open_instructions(host.folder)
        (host.folder / "superexec.secret").write_bytes(secrets.token_bytes(32))
        _sign_release(host)
        host.make_writable("proxy")
        host.make_writable("state")
        host.make_writable("database")
        host.make_writable("sums")
        (host.make_writable("state/.flwr") / "config.toml").write_text(
            host.here(
                '[superlink.deployment]\naddress = "127.0.0.1:8000"\n'
                f'root-certificates = "{FOLDER}/authority.pem"\n'
            )
        )
        programs = self._add_programs(host, "coordinator.yml", {"MODEL": str(model)})
        if not host.namespace:
            content = (_DOCKER / "nginx.conf").read_text()
            (host.folder / "nginx.conf").write_text(host.here(content))
        assert set(programs) == {"superlink", "superexec", "proxy"}

    def _prepare_institution(self, host: Host, data: Path, model: Path) -> None:
        coordinator = self.hosts["coordinator"]
        open_node_key(host.folder / "node")
        for name in ("authority.pem", "instructions.pub", "trusted.yaml"):
            shutil.copy(coordinator.folder / name, host.folder)
        (host.folder / "superexec.secret").write_bytes(secrets.token_bytes(32))
        (host.folder / "policy.toml").write_text(
            f'instruction-key = "{host.here(f"{FOLDER}/instructions.pub")}"\n'
            f'paths = ["{self.settings["model.name"]}"]\n'
            f'coordinators = ["{coordinator.address}"]\n'
            "split = {allowed = true}\n"
        )
        host.make_writable("state")
        host.make_writable("sums")
        if not host.namespace:
            (host.folder / "data").symlink_to(data)
        names = {"policy": "policy.toml"} | (
            {"worker": "state/worker.sock"} if self._worker else {}
        )
        paths = {key: host.here(f"{FOLDER}/{path}") for key, path in names.items()}
        write_site(host.folder, host.name, Path(host.here(f"{FOLDER}/data")), **paths)
        variables = {"COORDINATOR": self.address, "INSTITUTION": host.name}
        folders = {"DATA": str(data), "MODEL": str(model)}
        self._add_programs(host, "institution.yml", variables | folders)

    def _add_programs(
        self, host: Host, file: str, variables: Mapping[str, str]
    ) -> dict[str, Program]:
        services = read_services(_DOCKER / file, {"FOLDER": str(host.folder), **variables})
        self.programs[host.name] = {
            name: Program(host, service)
            for name, service in services.items()
            if name != "worker" or self._worker
        }
        return self.programs[host.name]


def _sign_release(host: Host) -> None:
    """Build the release and sign it with the key of a reviewer whom all sites trust."""
    _run_in(host.folder, "chambers", "site", "sign", "--key", "reviewer", "--output", "release")
    if not host.namespace:
        answer = host.folder / "release" / "fetch-fab.json"
        answer.write_text(host.here(answer.read_text()))


def _run_in(folder: Path, *command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(CHECKOUT)},
        check=False,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise DeploymentError(f"{' '.join(command)}: {result.stdout}{result.stderr}")
    return result.stdout


@contextmanager
def deployment(
    folder: Path, data: Mapping[str, Path], model: Path, worker: bool = False
) -> Iterator[Deployment]:
    """Set up and start a deployment, and end all of its processes afterwards.

    Args:
        folder: Folder in which a folder for each host is created.
        data: The data of each institution.
        model: Directory of the base model.
        worker: Whether each institution has a resident worker.

    """
    with network(folder, [*data, "outsider"]) as hosts:
        running = Deployment(hosts, data, model, worker)
        try:
            running.start()
            yield running
        finally:
            running.stop()
