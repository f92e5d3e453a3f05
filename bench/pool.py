"""Processes that measure at the same time."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that share the cores; they end with the block, however it ends."""
    os.environ["TQDM_DISABLE"] = "1"
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,)
    )
    try:
        yield executor
    except BaseException:
        # A measurement takes minutes, and its unfinished work is of no use.
        for process in list(executor._processes.values()):
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """Prepare a process: the main process alone answers to an interrupt."""
    import torch
    from flwr.common.logger import FLOWER_LOGGER

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    FLOWER_LOGGER.setLevel("WARNING")
