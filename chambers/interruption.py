"""Handling of signals that end a command: SIGINT, SIGTERM and SIGHUP."""

import signal

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def interrupt_at_end() -> None:
    """Raise ``KeyboardInterrupt`` on SIGTERM and SIGHUP too, unless the signal is ignored."""
    for each in END_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.default_int_handler)
