"""``chambers site certificates``: create the coordinator's certificate and signing key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.sources import argument, option

_MAX_DAYS = 3650


@dataclass(frozen=True)
class Certificates:
    """Write the coordinator's certificate, an authority that signs it, and a key for instructions.

    \b
      chambers site certificates /srv/chambers --name coordinator.example.org --name 10.0.0.5

    The certificate is valid for the given names, and for localhost and 127.0.0.1, which Flower's
    own processes use to reach the SuperLink. To renew the certificate, run the command again, which
    reuses the authority in FOLDER and, without --name, the names. An authority is valid for 10
    years. instructions.key, which is also reused, signs the coordinator's instructions.

    Every institution needs authority.pem and instructions.pub. The files ending in .key stay at the
    coordinator; authority.key is only needed for renewals, and can be stored elsewhere until then.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("FOLDER")]
    name: Annotated[
        list[str] | None,
        option(
            "Host name or IP address of the coordinator; may be repeated. Default: the "
            "names of the certificate in FOLDER.",
            "HOST",
        ),
    ] = None
    days: Annotated[int, option("Days until the certificate expires; default 365.", "N")] = 365

    def __call__(self) -> int:
        """Write server.key and server.pem, and the authority and signing key if missing."""
        if not 1 <= self.days <= _MAX_DAYS:
            raise CommandError(f"--days {self.days}: must be 1 to {_MAX_DAYS}")
        from chambers.site.authority import (
            AUTHORITY,
            SERVER,
            check_names,
            names_of,
            open_authority,
            read_certificate,
        )
        from chambers.site.instructions import open_instructions

        folder, server = self.folder, self.folder / SERVER
        names = self.name or []
        if not names and server.is_file():
            names = names_of(read_certificate(server))
        names = check_names(names)
        authority = open_authority(folder)
        public = open_instructions(folder)
        certificate = authority.issue(folder, names, self.days)
        authority_end = authority.certificate.not_valid_after_utc.date()
        end = certificate.not_valid_after_utc.date()
        print(f"{folder / AUTHORITY}: valid until {authority_end}; hand it to every institution")
        print(f"{public}: hand it to every institution, whose policy names it as instruction-key")
        print(
            f"{server}: valid until {end} for {', '.join(names_of(certificate))}; restart the "
            "proxy and the SuperLink to use it"
        )
        return 0
