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
        """Run a check, which returns what it has found or raises ``CommandError``.

        Returns:
            Whether it has passed.

        """
        try:
            print(f"ok   {check(*arguments, **keywords)}", flush=True)
        except CommandError as error:
            print(f"fix  {error}", flush=True)
            self.passed = False
            return False
        return True


def disk(path: Path) -> str:
    """Check the free space of the file system that the path is on, or will be."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = psutil.disk_usage(str(folder)).free / _GIB
    text = f"disk: {free:.1f} GiB free in {folder}"
    if free < _LEAST_FREE_GIB:
        raise CommandError(f"{text}; at least {_LEAST_FREE_GIB:g} GiB are needed: delete old runs")
    return text
