"""``chambers site coordinator``: set up the coordinator's folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument

_SENT = "for-institutions"
_DAYS = 365  # for which a new certificate is valid
_FILES = (
    *("flower.env", "state/.flwr/config.toml", "nginx.conf", "run.toml"),
    *(f"systemd/chambers-{name}.service" for name in ("superlink", "serverapp", "proxy")),
)


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

    def __call__(self) -> int:
        """Write the files that are missing, and print what to send to the institutions."""
        from chambers.site import authority
        from chambers.site.keys import PUBLIC, open_instructions

        names = authority.check_names(self.names)
        folder = host.open_folder(self.folder, self.model)
        server = folder / authority.SERVER
        if not server.exists():
            authority.open_authority(folder).issue(folder, names, _DAYS)
        certificate = authority.read_certificate(server)
        known = authority.names_of(certificate)
        if missing := ", ".join(name for name in names if name not in known):
            raise CommandError(f"{server} is not valid for {missing}: delete it for a new one")
        open_instructions(folder)
        for name, mode in (("database", 0o700), ("proxy", 0o755), (_SENT, 0o755)):
            (folder / name).mkdir(mode=mode, exist_ok=True)
        address = f"[{names[0]}]" if ":" in names[0] else names[0]
        host.complete(folder, _FILES, self.model, {"coordinator.example.org": address})
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
