"""``chambers``, or ``python -m chambers``: one tool that trains, serves and generates."""

import argparse
import os
import sys
from collections.abc import Sequence

from chambers import generate, serve, train
from chambers.errors import CommandError

_COMMANDS = {"train": train, "serve": serve, "generate": generate}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: those of the command line when None.

    Returns:
        The exit status: 0 if it did what was asked, 1 if a run failed, 2 if something was wrong
        with what was asked, 130 if it was interrupted.

    """
    parser = argparse.ArgumentParser(
        prog="chambers",
        description="Fine-tune language models on text that may not leave its owners; use them.",
        epilog="chambers COMMAND --help says more. Real deployments are run by Flower: flwr run.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_arguments(
            subparsers.add_parser(
                name,
                help=module.HELP,
                description=module.DESCRIPTION,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    given = parser.parse_args(arguments)
    try:
        status: int = _COMMANDS[given.command].run(given)
        return status
    except CommandError as error:
        print(f"chambers {given.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"chambers {given.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
