"""The output of ``chambers site check``: one line per check, with its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chambers.errors import CommandError
from finetuning.errors import UserError


class AdviceError(CommandError):
    """A check has passed, but a change is recommended."""


@dataclass
class Report:
    """Prints a line for each check, and records whether all checks have passed."""

    passed: bool = True

    def line(self, check: Callable[..., str], *arguments: Any) -> bool:
        """Run a check, and print the description that it returns or the error that it raises.

        Return whether the check has passed: it fails if it raises ``OSError`` or a ``UserError``
        other than ``AdviceError``.
        """
        try:
            print(f"ok   {check(*arguments)}", flush=True)
            return True
        except AdviceError as error:
            print(f"warn {error}", flush=True)
            return True
        except UserError as error:
            problem = str(error)
        except OSError as error:
            where = f"{error.filename} can't be read: " if error.filename else ""
            problem = f"{where}{error.strerror or error}"
            if isinstance(error, PermissionError):
                problem += "; run this as the SuperLink's or SuperNode's user, and check who owns "
                problem += "the file and folders"
        print(f"fix  {problem}", flush=True)
        self.passed = False
        return False
