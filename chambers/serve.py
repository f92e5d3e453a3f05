"""``chambers serve``: a block server at which invited institutions use a model."""

import argparse
import signal
import sys
import threading
from pathlib import Path

from chambers.errors import CommandError
from chambers.generate import add_model_arguments

HELP = "serve a model's middle blocks to institutions that generate with it"
DESCRIPTION = """\
Hold a trained model's middle blocks, for institutions that generate with the first and last ones:

  chambers serve runs/2026-01-31_12-00-00_fl-glm --listen 10.0.0.5:8900 --clients court hospital

Each client gets an invitation, a file that it gives to: chambers generate --invitation. It opens
lanes in the client's name, any number until it expires or the server ends, so hand it over by a
way that keeps it secret. To revoke invitations, start the server anew. Lanes are encrypted by
themselves. The server runs until it is interrupted.
"""

_DAY_SECONDS = 24 * 60 * 60.0
_MOST_DAYS = 3650


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    what = parser.add_argument_group("what to serve")
    what.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN_FOLDER",
        help="a run's results: its global model and each client's personalised one",
    )
    what.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="one adapter instead, as the global model"
    )
    add_model_arguments(what)
    what.add_argument(
        "--head-blocks", type=int, metavar="N", help="at the clients; default as in the run, else 1"
    )
    what.add_argument(
        "--tail-blocks", type=int, metavar="N", help="at the clients; default as in the run, else 1"
    )
    where = parser.add_argument_group("where, and for whom")
    where.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="port 0 takes a free one; default 127.0.0.1:0, this machine alone",
    )
    where.add_argument(
        "--advertise", default="", metavar="HOST:PORT", help="what clients dial, if it is another"
    )
    where.add_argument(
        "--clients",
        nargs="+",
        metavar="NAME",
        help="who gets an invitation; default the run's clients with personalised models",
    )
    where.add_argument(
        "--invitations",
        type=Path,
        default=Path("invitations"),
        metavar="FOLDER",
        help="where they are written; default invitations",
    )
    where.add_argument(
        "--valid-for", type=float, default=7.0, metavar="DAYS", help="of invitations; default 7"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--body-devices",
        metavar="cuda:0,…",
        help="GPUs that the blocks are spread over, or cpu; default as in the run, else all GPUs",
    )
    how.add_argument(
        "--wire-dtype",
        choices=["float32", "bfloat16", "int8"],
        help="how hidden states travel; default as in the run, else bfloat16",
    )
    how.add_argument(
        "--most-tokens",
        type=int,
        default=16384,
        metavar="N",
        help="padded tokens, of prompts and new, that are held at once; lower it when memory does "
        "not suffice; default 16384",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    import logging

    from chambers.serving import find, serving

    if not 0 < arguments.valid_for <= _MOST_DAYS:
        raise CommandError(
            f"--valid-for {arguments.valid_for:g}: must be more than 0 days, {_MOST_DAYS} at most"
        )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    over = threading.Event()
    served = find(arguments)
    with serving(served, arguments.valid_for * _DAY_SECONDS) as (address, files):
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: over.set())
        for client, file in files.items():
            print(f"invitation of {client}, to {', '.join(served.models[client])}: {file}")
        blocks = served.cut.range_of("body")
        print(f"serving blocks {blocks.start} to {blocks.stop - 1} at {address}", flush=True)
        over.wait()
        print("ending", flush=True)
    return 0
