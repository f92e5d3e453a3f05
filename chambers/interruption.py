"""Signals that end a command early: Ctrl-C, ``kill``, and a terminal that is closed."""

import signal

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def interrupt_at_end() -> None:
    """Raise ``KeyboardInterrupt`` at SIGTERM and SIGHUP too, unless they are ignored."""
    for each in END_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.default_int_handler)
