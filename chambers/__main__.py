"""``chambers``, or ``python -m chambers``: one tool that trains, serves and generates."""

import os
import sys
from collections.abc import Sequence

import click
import typer

from chambers.errors import CommandError
from chambers.generate import Generate
from chambers.serve import Serve
from chambers.train import Train

app = typer.Typer(add_completion=False, rich_markup_mode=None, suggest_commands=False)
for _command in (Train, Serve, Generate):
    app.command(_command.__name__.lower(), help=_command.__doc__)(_command)


@app.callback(
    epilog="Run chambers COMMAND --help for a command's options. To start a deployment: flwr run.",
)
def _chambers() -> None:
    """Fine-tune language models on text that may not leave its owners, and use them."""


def parse(arguments: Sequence[str]) -> Train | Serve | Generate:
    """Parse the arguments to a command and its options.

    Raises:
        click.UsageError: The arguments are not those of a command.

    """
    with typer.main.get_command(app).make_context("chambers", list(arguments)) as context:
        command: Train | Serve | Generate = context.command.invoke(context)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Arguments; None for those of the command line.

    Returns:
        The exit status: 0 on success, 1 if a run failed, 2 if the command was refused, 130 if it
        was interrupted.

    """
    name = "chambers"
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments)
        name = f"chambers {type(command).__name__.lower()}"
        return command()
    except click.exceptions.Exit as end:  # --help
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        reason = error.format_message().rstrip(".")
        print(f"{path}: {reason}; {path} --help lists all options", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
