"""``chambers site coordinator``: set up the coordinator's folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument, option

_SENT = "for-institutions"
_FILES = (
    *("flower.env", "state/.flwr/config.toml", "nginx.conf", "run.toml"),
    *(f"systemd/chambers-{name}.service" for name in ("superlink", "serverapp", "proxy")),
)
_MAX_DAYS = 3650


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
    folder: Annotated[Path, host.FOLDER] = Path()
    model: Annotated[str, host.MODEL] = "tiny"
    days: Annotated[int, option("Days until a new certificate expires; default 365.", "N")] = 365

    def __call__(self) -> int:
        """Write the files that are missing, and print what to send to the institutions."""
        from chambers.site.authority import (
            AUTHORITY,
            SERVER,
            check_names,
            names_of,
            open_authority,
            read_certificate,
        )
        from chambers.site.instructions import PUBLIC, open_instructions

        names = check_names(self.names)
        if not 1 <= self.days <= _MAX_DAYS:
            raise CommandError(f"--days {self.days}: must be 1 to {_MAX_DAYS}")
        folder = host.open_folder(self.folder, self.model)
        server = folder / SERVER
        if not server.exists():
            open_authority(folder).issue(folder, names, self.days)
        certificate = read_certificate(server)
        if missing := ", ".join(name for name in names if name not in names_of(certificate)):
            raise CommandError(f"{server} is not valid for {missing}: delete it for a new one")
        open_instructions(folder)
        for name, mode in (("database", 0o700), ("proxy", 0o755), (_SENT, 0o755)):
            (folder / name).mkdir(mode=mode, exist_ok=True)
        host.complete(folder, _FILES, self.model, {"coordinator.example.org": names[0]})
        sent = [Path(shutil.copy(folder / name, folder / _SENT)) for name in (AUTHORITY, PUBLIC)]
        end = certificate.not_valid_after_utc.date()
        print(f"{server}: valid until {end} for {', '.join(names_of(certificate))}")
        print(f"send {folder / _SENT} to every institution, and read out by telephone:")
        host.print_digests(*sent)
        print(f"when the reviewer's folder release is in {folder}, start the programs:")
        print(f"  chambers site up {folder}")
        return 0
