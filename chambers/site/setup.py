"""``chambers site coordinator``, ``join`` and ``update``: set up the folders of hosts."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError
from chambers.settings import read_settings
from chambers.site import host
from chambers.sources import argument, option
from finetuning.files import write_file
from finetuning.model.names import BUILT_IN, TINY

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_SENT = "for-institutions"
_DAYS = 365  # for which a new certificate is valid
_FIREWALL = ("nftables.conf", "systemd/chambers-firewall.service")
_COORDINATOR_PROGRAMS = (
    *("nginx.conf", *_FIREWALL),
    *(f"systemd/chambers-{name}.service" for name in ("superlink", "serverapp", "proxy")),
)
_COORDINATOR_FILES = (
    *("flower.env", "state/.flwr/config.toml", "run.toml"),
    *_COORDINATOR_PROGRAMS,
)
_RECEIVED = ("authority.pem", "instructions.pub", host.TRUSTED)
_INSTITUTION_PROGRAMS = (
    *_FIREWALL,
    *(f"systemd/chambers-{name}.service" for name in ("supernode", "clientapp", "worker")),
)
_INSTITUTION_FILES = (
    *("flower.env", host.INSTITUTION, host.SITE, "policy.toml"),
    *_INSTITUTION_PROGRAMS,
)
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Coordinator:
    """Write what the coordinator of a deployment needs to its folder.

    \b
      chambers site coordinator coordinator.example.org --model /models/qwen

    NAME is the host name or address at which institutions reach the coordinator's ports 8443 and,
    with fl-glm, 9000; the certificate is also valid for further names, and for localhost. Run the
    command again to write what is missing; files that exist, such as keys, are not changed. To
    renew the certificate, delete server.pem first. The authority that signs it, authority.key, is
    valid for 10 years, and can be stored elsewhere until a renewal.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    names: Annotated[list[str], argument("NAME…")]
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()
    model: Annotated[str | None, host.MODEL_OPTION] = None

    def __call__(self) -> int:
        """Write the files that are missing, and print what to send to the institutions."""
        from chambers.site import authority
        from chambers.site.keys import PUBLIC, open_instructions

        names = authority.check_names(self.names)
        file = self.folder / "run.toml"  # of an earlier call
        before = read_settings([str(file)]) if file.exists() else {}
        model = self.model or str(before.get("model.name", TINY))
        folder = host.open_folder(self.folder, model)
        server = folder / authority.SERVER
        if not server.exists():
            authority.open_authority(folder).issue(folder, names, _DAYS)
        certificate = authority.read_certificate(server)
        known = authority.names_in(certificate)
        if missing := ", ".join(name for name in names if name not in known):
            raise CommandError(f"{server} is not valid for {missing}: delete it for a new one")
        open_instructions(folder)
        for name, mode in (("database", 0o700), ("proxy", 0o755), (_SENT, 0o755)):
            (folder / name).mkdir(mode=mode, exist_ok=True)
        address = f"[{names[0]}]" if ":" in names[0] else names[0]
        host.complete(folder, _COORDINATOR_FILES, model, {"coordinator.example.org": address})
        public = [folder / authority.AUTHORITY, folder / PUBLIC]
        for file in public:
            shutil.copy(file, folder / _SENT)
        end = certificate.not_valid_after_utc.date()
        print(f"{server}: valid until {end} for {', '.join(known)}")
        print(f"send {folder / _SENT} to every institution, and read out by telephone:")
        host.print_digests(*public)
        print(f"when the reviewer's folder release is in {folder}, start the programs:")
        print(f"  chambers site up {folder}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Join:
    """Write what an institution needs to its folder, check it, and wait for admission.

    \b
      chambers site join --name court --coordinator coordinator.example.org:8443 \\
        --data /data/legal --model /models/qwen

    The folder must contain authority.pem and instructions.pub from the coordinator, and
    trusted.yaml from the reviewer. Run the command again to continue, or to write what is missing;
    files that exist, such as the node key and policy.toml, are not changed.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    name: Annotated[str, option("Name of the institution in every run.", "NAME")]
    coordinator: Annotated[str, option("Address of the coordinator's proxy.", "HOST:PORT")]
    data: Annotated[Path, option("Folder with train.jsonl, or a file of rows.", "PATH")]
    model: Annotated[str, host.MODEL_OPTION]
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()
    wait: Annotated[
        float, option("Minutes to wait for admission; default 15; 0 doesn't wait.", "MINUTES")
    ] = 15.0

    def __call__(self) -> int:
        """Write the files that are missing; return 0 once the institution is admitted."""
        from chambers.site.connection import host_and_port
        from chambers.site.keys import open_node_key, open_peer_key

        host.check_institution_name(self.name)
        server, _ = host_and_port(self.coordinator)
        if not self.data.exists():
            raise CommandError(f"--data {self.data}: there is no such file or folder")
        folder = host.open_folder(self.folder, self.model)
        if missing := [name for name in _RECEIVED if not (folder / name).exists()]:
            raise CommandError(
                f"{folder} lacks {', '.join(missing)}: the reviewer sends {host.TRUSTED}, and the "
                "coordinator the other files"
            )
        key = open_node_key(folder / "node")
        host.link(folder / "data", self.data)
        values = {
            "coordinator.example.org:8443": self.coordinator,
            "coordinator.example.org": server,
            "INSTITUTION=court": f"INSTITUTION={self.name}",
            'name = "court"': f'name = "{self.name}"',
        }
        host.complete(folder, _INSTITUTION_FILES, self.model, values)
        print("compare with the coordinator and the reviewer by telephone:")
        host.print_digests(*(folder / name for name in _RECEIVED))
        print(f"send {folder}/node.pub to the coordinator, and read out by telephone:")
        host.print_digests(folder / "node.pub")
        peer = open_peer_key(folder / host.PEER)
        print(f"for masked sums, send {peer} to the reviewer, and read out by telephone:")
        host.print_digests(peer)
        return self._await_admission(folder, key)

    def _await_admission(self, folder: Path, key: "ec.EllipticCurvePrivateKey") -> int:
        from chambers.site.check_institution import report_on_institution
        from chambers.site.connection import is_registered

        host.enter(folder)
        model = self.model if self.model in BUILT_IN else f"{folder}/model"
        if not report_on_institution(folder, model, registered=False).passed:
            print("resolve the lines that begin with fix, and run the same command again")
            return 1
        print("waiting for admission (the coordinator runs chambers site admit)", flush=True)
        end = time.monotonic() + 60.0 * self.wait
        while not is_registered(self.coordinator, folder / "authority.pem", key):
            if time.monotonic() > end:
                print("not admitted yet; to continue, run the same command again")
                return 1
            time.sleep(_POLL_SECONDS)
        print(f"{self.name} is admitted; start the programs:\n  chambers site up {folder}")
        return 0


@dataclass(frozen=True)
class Update:
    """Replace a host's units and proxy configuration by those of this version of Chambers.

    \b
      chambers site update /srv/chambers

    FOLDER is the host's, by default the current one. Each replaced file is kept with the suffix
    .old. At an institution without a site.toml, write it, from institution.env. Then run systemctl
    daemon-reload, and restart the programs.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("[FOLDER]")] = Path()

    def __call__(self) -> int:
        """Replace the files, and name each of them."""
        folder = self.folder.absolute()
        if not (folder / "state").is_dir():
            raise CommandError(f"{folder} is not a host's folder: name the folder")
        (folder / host.SUMS).mkdir(exist_ok=True)
        environment = folder / host.INSTITUTION
        files = _INSTITUTION_PROGRAMS if environment.exists() else _COORDINATOR_PROGRAMS
        for file in files:
            target, text = folder / file, host.render_template(folder, file, {})
            if target.exists() and target.read_text(encoding="utf-8") == text:
                continue
            if target.exists():
                target.replace(f"{target}.old")
            write_file(target, text)
            print(f"{target} is new")
        if environment.exists() and not (folder / host.SITE).exists():
            before = host.read_environment(environment)
            values = {'name = "court"': f'name = "{before["INSTITUTION"]}"'}
            if before.get("WORKER"):
                values["# worker = "] = "worker = "
                values["/srv/chambers/state/worker.sock"] = before["WORKER"]
            write_file(folder / host.SITE, host.render_template(folder, host.SITE, values))
            print(f"{folder / host.SITE} is new")
        return 0
