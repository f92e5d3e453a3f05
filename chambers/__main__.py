"""The command-line tool ``chambers``, also run as ``python -m chambers``."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated

import click
import typer

from chambers.allocator import restart_with_allocator
from chambers.app_folder import DOCS
from chambers.checkpoints import Convert, Export, Merge
from chambers.data import Data
from chambers.endpoint.chat import Chat
from chambers.endpoint.command import Api
from chambers.errors import describe_error
from chambers.evaluate import Evaluate
from chambers.experiment.command import Experimenting
from chambers.generate import Generate
from chambers.leaks import LeakTest
from chambers.run import Run, Stop
from chambers.serve import Serve, Stage
from chambers.sheet.command import Make, Read
from chambers.site.audit import Audit, Used
from chambers.site.check import Check
from chambers.site.nodes import Admit, Expel, Nodes
from chambers.site.programs import StartWorker, Up
from chambers.site.record import Record
from chambers.site.setup import Coordinator, Join, Update
from chambers.site.sign import Sign
from chambers.status import Status
from chambers.train import Train
from chambers.withdrawal import Withdraw
from finetuning.errors import UserError

# By default, Typer escapes "[required]" for rich, which is not used here to format the help.
typer.core.HAS_RICH = False

_NAMES: dict[type, str] = {}  # full names, such as "chambers site check"
_COMMANDS = {
    "train": Train,
    "data": Data,
    "run": Run,
    "stop": Stop,
    "status": Status,
    "evaluate": Evaluate,
    "generate": Generate,
    "leaks": LeakTest,
    "withdraw": Withdraw,
    "serve": Serve,
    "stage": Stage,
    "api": Api,
    "chat": Chat,
    "merge": Merge,
    "export": Export,
    "convert": Convert,
    "experiment": Experimenting,
}
_SITE_COMMANDS = {
    "coordinator": Coordinator,
    "sign": Sign,
    "join": Join,
    "admit": Admit,
    "nodes": Nodes,
    "expel": Expel,
    "up": Up,
    "check": Check,
    "worker": StartWorker,
    "update": Update,
    "audit": Audit,
    "used": Used,
    "record": Record,
}


def _group(words: str, commands: Mapping[str, type]) -> typer.Typer:
    """Return a command group, invoked as ``words``; ``commands`` are keyed by name."""
    group = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        suggest_commands=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in commands.items():
        _NAMES[command] = f"{words} {name}"
        group.command(name, help=command.__doc__)(command)
    return group


app = _group("chambers", _COMMANDS)
app.add_typer(
    _group("chambers site", _SITE_COMMANDS),
    name="site",
    help="Set up and check the coordinator or an institution of a deployment.",
    short_help="Set up and check a deployment.",
)
app.add_typer(
    _group("chambers sheet", {"make": Make, "read": Read}),
    name="sheet",
    help="Have people score answers without showing them which model wrote which answer.",
    short_help="Run a blinded human evaluation.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"chambers {version('chambers')}")
        raise typer.Exit


@app.callback(
    epilog="chambers COMMAND --help lists all options. docs/deployment.md describes deployments; "
    f"the folder docs is {DOCS}.",
)
def _chambers(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Fine-tune language models on private text that stays with its owners, and use the models."""


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """Parse arguments into a callable command; raise ``click.UsageError`` if they are invalid."""
    with typer.main.get_command(app).make_context("chambers", list(arguments)) as context:
        command: Callable[[], int] = context.command.invoke(context)
    return command


def _reason(error: UserError | click.ClickException | OSError | RuntimeError) -> str:
    """Return the text of an error for users; re-raise an unexpected ``RuntimeError``."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, click.ClickException):  # of Flower's client
        return error.format_message()
    if isinstance(error, OSError):
        return describe_error(error)
    if type(error).__name__ == "OutOfMemoryError":  # by name: importing PyTorch is slow
        from finetuning.devices import memory_problem

        return memory_problem(error, "use a smaller model or batch, or --quantization nf4")
    if "home directory" not in str(error):  # pathlib's message for an unknown home
        raise error
    return "the home directory of a path that begins with ~ is unknown; write the path in full"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments specify; by default, use those in ``sys.argv``.

    Return the exit status: 0 on success, 1 if a run or a check failed or standard output was
    closed, 2 if the command was refused or a file can't be accessed, 130 after an interruption.
    """
    name = "chambers"
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments)
        name = _NAMES[type(command)]
        if arguments is None and isinstance(command, Serve | Stage):
            restart_with_allocator()
        status = command()
        print(end="", flush=True)  # so that an error of standard output is handled here
        return status
    except click.exceptions.Exit as end:  # --help
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        reason = error.format_message().rstrip(".")
        print(f"{path}: {reason}; {path} --help lists all options", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, click.ClickException, OSError, RuntimeError) as error:
        print(f"{name}: {_reason(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
