"""A run of the app in simulation on this machine, from the SuperLink's start to its end."""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from chambers.superlink import private_superlink, run_app
from strategies.run_config import Scalar

CHECKOUT = Path(__file__).resolve().parent.parent


def simulate(config: Mapping[str, Scalar], clients: int, home: Path) -> int:
    """Run the app, showing its log, and end every process of it.

    Args:
        config: what differs from the app's own run config.
        clients: how many are simulated.
        home: for what Flower keeps of the run.

    Returns:
        The exit status: 0 if the run completed, 1 if it failed, 130 if it was interrupted.

    Raises:
        CommandError: Flower's SuperLink could not be started, or asked.

    """
    # Whoever ends this process means the run, which has processes in sessions of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        with private_superlink(home) as superlink:
            status = run_app(CHECKOUT, superlink, config, clients)
    except KeyboardInterrupt:
        print("interrupted; every process of the run has been ended", file=sys.stderr)
        return 130
    print(f"run {status} after {time.monotonic() - started:.0f} s")
    return 0 if status == "finished:completed" else 1
