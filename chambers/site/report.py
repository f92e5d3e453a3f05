"""The lines of ``chambers site check``: what is in order, and what to do about the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from chambers.errors import CommandError
from finetuning.errors import UserError

Arguments = ParamSpec("Arguments")


class AdviceError(CommandError):
    """Something that works but should be changed."""


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
        """Run a check; it returns what it has found, or raises ``UserError`` or ``OSError``.

        With ``AdviceError`` it has passed all the same.

        Returns:
            Whether it has passed.

        """
        try:
            print(f"ok   {check(*arguments, **keywords)}", flush=True)
        except AdviceError as error:
            print(f"warn {error}", flush=True)
        except UserError as error:
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
