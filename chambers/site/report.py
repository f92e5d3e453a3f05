"""The lines of ``chambers site check``: what is in order, and what to do about the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import psutil

from chambers.errors import CommandError

Arguments = ParamSpec("Arguments")
_GIB = 2**30
# Adapters and optimizer states of two rounds, checkpoints, and the SuperLink's messages.
_LEAST_FREE_GIB = 5.0


@dataclass
class Report:
    """Prints a line for each check, and remembers whether all have passed."""

    passed: bool = True

    def line(
        self,
        check: Callable[Arguments, str],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> bool:
        """Run a check; it returns what it has found, or raises ``CommandError`` or ``OSError``.

        Args:
            check: The check.
            arguments: Its arguments.
            keywords: Its keyword arguments.

        Returns:
            Whether it has passed.

        """
        try:
            print(f"ok   {check(*arguments, **keywords)}", flush=True)
        except CommandError as error:
            return self._fix(str(error))
        except OSError as error:
            where = f"{error.filename} can't be read: " if error.filename else ""
            cure = (
                "; run this as the programs' user, and see who owns the file and its folders"
                if isinstance(error, PermissionError)
                else ""
            )
            return self._fix(f"{where}{error.strerror or error}{cure}")
        return True

    def _fix(self, text: str) -> bool:
        print(f"fix  {text}", flush=True)
        self.passed = False
        return False


def disk(path: Path) -> str:
    """Check the free space of the file system that the path is on, or will be."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = psutil.disk_usage(str(folder)).free / _GIB
    text = f"disk: {free:.1f} GiB free in {folder}"
    if free < _LEAST_FREE_GIB:
        raise CommandError(f"{text}; at least {_LEAST_FREE_GIB:g} GiB are needed: delete old runs")
    return text
