"""Execute a simulated run, show its progress and results, and write its log."""

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from chambers.app_folder import write_app
from chambers.errors import interrupt_at_end
from chambers.run_view import Lines, RunLog, following, live_view
from chambers.superlink import COMPLETED, RUN_LINK, private_superlink, run_app
from federation.run_config import Scalar
from federation.run_folder import LOG, SUMMARY, checkpoint_files

_INTERRUPTED = "interrupted"


def simulate(
    config: Mapping[str, Scalar],
    clients: int,
    resources: str,
    home: Path,
    results: Path,
    verbose: bool = False,
) -> int:
    """Simulate a run and show its progress; finally, end all processes of the run.

    The clients take turns on actors with ``resources``, as options of Flower. ``config`` contains
    the settings that differ from the app's run config. Flower's files are written to ``home``, and
    the log to ``results`` if the run has no folder. With ``verbose``, the log is printed too.

    Return the exit status: 0 if the run completed, 1 if it failed, 130 if it was interrupted. Raise
    ``CommandError`` if Flower's SuperLink could not be started or queried.
    """
    # On SIGTERM and SIGHUP, also end the processes of the run, which are in other sessions.
    interrupt_at_end()
    # Discard this process's warnings, since logging has no handler; the log has all others.
    logging.captureWarnings(True)
    started = time.monotonic()
    with closing(RunLog(home / LOG, echo=verbose)) as log:
        try:
            with private_superlink(home) as superlink:
                shown = nullcontext(Lines()) if verbose or not sys.stdout.isatty() else live_view()
                with shown as show, following(home / RUN_LINK, log, show):
                    status = run_app(
                        app=write_app(home / "app"),
                        superlink=superlink,
                        run_config=config,
                        supernodes=clients,
                        resources=resources,
                        write=log.write,
                    )
                if status != COMPLETED:
                    log.write(b"\nThe SuperLink's log:\n" + superlink.log.read_bytes())
        except KeyboardInterrupt:
            status = _INTERRUPTED
        finally:
            link = home / RUN_LINK  # broken if the run was refused and its folder deleted
            directory = link.resolve() if link.is_dir() else None
            name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{LOG}"
            log.move_to(directory / LOG if directory else results / name)
    if status == COMPLETED and directory:
        _print_summary(directory)
    if status != _INTERRUPTED:
        seconds = time.monotonic() - started
        print(
            f"run {status.partition(': ')[0].removeprefix('finished:')} after {seconds:.0f} s",
            flush=True,
        )
    if status != COMPLETED:
        _print_end(status, directory, log.path)
    return {COMPLETED: 0, _INTERRUPTED: 130}.get(status, 1)


def _print_summary(directory: Path) -> None:
    """Print the tables of a completed run; omit blank lines if the output isn't a terminal."""
    with suppress(OSError):  # there is no summary if the disk was full
        lines = (directory / SUMMARY).read_text(encoding="utf-8").splitlines()
        wanted = ["", *lines] if sys.stdout.isatty() else filter(str.strip, lines)
        print(*wanted, sep="\n", flush=True)


def _print_end(status: str, directory: Path | None, log: Path) -> None:
    """Print why a run did not complete, how to continue it, and the path of its log."""
    if status == _INTERRUPTED:
        print("interrupted; all processes of the run have ended", file=sys.stderr)
    else:
        print(f"chambers train: {status.partition(': ')[2]}", file=sys.stderr)
    if directory and checkpoint_files(directory):
        print(f'to continue, add: resume="{directory}"', file=sys.stderr)
    print(f"log: {log}", file=sys.stderr)
