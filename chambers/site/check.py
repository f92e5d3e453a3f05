"""``chambers site check``: check whether a machine of a deployment is ready."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.sources import option


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check whether an institution, or the coordinator, is ready for runs.

    At an institution, with the options of its flower-supernode:

    \b
      chambers site check --superlink coordinator.example.org:8443 \\
        --root-certificates authority.pem --auth-supernode-private-key node \\
        --trusted-entities trusted.yaml \\
        --node-config 'name="court" data-path="/data/court" policy="/srv/chambers/policy.toml"'

    At the coordinator, with the folder that chambers site coordinator has written:

    \b
      chambers site check --coordinator /srv/chambers --proxy coordinator.example.org:8443 \\
        --database /srv/chambers/database/superlink.db

    Each line begins with ok, fix or warn; lines with fix or warn say what to do. The exit status is
    0 only if nothing needs to be fixed.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    superlink: Annotated[
        str,
        option(
            "Address of the SuperLink: at an institution, the address of the coordinator's proxy; "
            "at the coordinator, by default 127.0.0.1:8000.",
            "HOST:PORT",
        ),
    ] = ""
    root_certificates: Annotated[
        Path | None, option("The coordinator's authority.pem.", "FILE")
    ] = None
    auth_supernode_private_key: Annotated[
        Path | None, option("Node key, from chambers site join.", "FILE")
    ] = None
    trusted_entities: Annotated[
        Path | None, option("Keys of the reviewers whose releases may run here.", "FILE")
    ] = None
    node_config: Annotated[str, option("The SuperNode's configuration.", "KEY=VALUE…")] = ""
    model: Annotated[
        str, option("Base model of the planned run; must be on this machine.", "NAME_OR_PATH")
    ] = ""
    task: Annotated[
        str, option("Task of the planned run (data.task), whose rows are checked.", "TASK")
    ] = ""
    coordinator: Annotated[
        Path | None, option("Check the coordinator, whose certificates are in FOLDER.", "FOLDER")
    ] = None
    proxy: Annotated[str, option("Public address of the coordinator's proxy.", "HOST:PORT")] = ""
    database: Annotated[Path | None, option("The SuperLink's database.", "FILE")] = None

    def __call__(self) -> int:
        """Run all checks, and print a line for each check."""
        if self.coordinator:
            self._require("the coordinator", "proxy", "database")
            from chambers.site.check_coordinator import check_coordinator as check
        else:
            needed = ("superlink", "root_certificates", "auth_supernode_private_key", "node_config")
            self._require("an institution", *needed)
            from chambers.site.check_institution import check_institution as check
        return 0 if check(self).passed else 1

    def _require(self, where: str, *names: str) -> None:
        missing = [f"--{name.replace('_', '-')}" for name in names if not getattr(self, name)]
        if missing:
            raise CommandError(f"at {where}, {' and '.join(missing)} must be given")
