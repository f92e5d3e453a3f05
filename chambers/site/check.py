"""``chambers site check``: check whether a machine of a deployment is ready."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.site import host
from chambers.sources import argument, option


@dataclass(frozen=True)
class Check:
    """Check whether an institution, or the coordinator, is ready for runs.

    \b
      chambers site check /srv/chambers

    FOLDER, by default the current one, is the host's folder. Each line begins with ok, fix or warn;
    lines with fix or warn say what to do. The exit status is 0 only if nothing needs to be fixed.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("[FOLDER]")] = Path()
    model: Annotated[
        str, option("Base model of the planned run; must be on this machine.", "NAME_OR_PATH")
    ] = ""
    task: Annotated[
        str, option("Task of the planned run (data.task), whose rows are checked.", "TASK")
    ] = ""

    def __call__(self) -> int:
        """Run all checks, and print a line for each check."""
        folder = self.folder.absolute()
        host.enter(folder)
        if (folder / host.INSTITUTION).exists():
            from chambers.site.check_institution import check_institution

            return 0 if check_institution(folder, self.model, self.task).passed else 1
        from chambers.site.check_coordinator import check_coordinator

        return 0 if check_coordinator(folder, self.model).passed else 1
