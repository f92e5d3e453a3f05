"""``chambers site join``: set up an institution's folder, and wait for its admission."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import option
from finetuning.model.names import BUILT_IN

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_RECEIVED = ("authority.pem", "instructions.pub", host.TRUSTED)
_FILES = (
    *("flower.env", host.INSTITUTION, "policy.toml"),
    *(f"systemd/chambers-{name}.service" for name in ("supernode", "clientapp", "worker")),
)
_POLL_SECONDS = 2.0


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
    model: Annotated[str, host.MODEL]
    folder: Annotated[Path, host.FOLDER] = Path()
    wait: Annotated[
        float, option("Minutes to wait for admission; default 15; 0 doesn't wait.", "MINUTES")
    ] = 15.0

    def __call__(self) -> int:
        """Write the files that are missing; return 0 once the institution is admitted."""
        from chambers.site.connection import host_and_port
        from chambers.site.keys import open_node_key

        host.check_name(self.name)
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
        }
        host.complete(folder, _FILES, self.model, values)
        print("compare with the coordinator and the reviewer by telephone:")
        host.print_digests(*(folder / name for name in _RECEIVED))
        print(f"send {folder}/node.pub to the coordinator, and read out by telephone:")
        host.print_digests(folder / "node.pub")
        return self._await_admission(folder, key)

    def _await_admission(self, folder: Path, key: "ec.EllipticCurvePrivateKey") -> int:
        from chambers.site.check_institution import check_institution
        from chambers.site.connection import is_registered

        host.enter(folder)
        model = self.model if self.model in BUILT_IN else f"{folder}/model"
        if not check_institution(folder, model, registered=False).passed:
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
