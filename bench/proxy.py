"""A line between client and server: a TCP proxy with a delay each way and a limited rate.

    python -m bench.proxy 127.0.0.1:8900 --delay 0.02 --gigabits 1

It prints the port at which it listens and forwards each connection until its standard input ends.
What comes is stamped with the time at which the line would have carried its last byte, and given
out then: the delay costs no throughput, and each direction has the rate for itself. TCP's own
slow start is that of the loopback on both sides of the proxy, so that of a real long line (which
gRPC's large windows leave after a few round trips) is not measured.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

_HOST = "127.0.0.1"
_STOP_SECONDS = 5.0


class _Direction(asyncio.Protocol):
    """Takes bytes from one side and gives them to the other in their time.

    Args:
        delay: seconds that a byte is under way.
        bytes_per_second: that the line carries.
        target: host and port to connect to for a connection that came in; None when it goes out.

    """

    def __init__(
        self, delay: float, bytes_per_second: float, target: tuple[str, int] | None
    ) -> None:
        self._delay, self._rate, self._target = delay, bytes_per_second, target
        self._loop = asyncio.get_running_loop()
        self._own: asyncio.Transport | None = None
        self._other: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._free = 0.0  # when the line has carried all that came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect the other side, if this is the one that came in."""
        self._own = cast(asyncio.Transport, transport)
        if self._target is not None:
            self._own.pause_reading()
            self._connecting = self._loop.create_task(self._connect(*self._target))

    def data_received(self, data: bytes) -> None:
        """Give the bytes to the other side when the line would have brought them."""
        if self._other is not None:
            self._free = max(self._free, self._loop.time()) + len(data) / self._rate
            self._loop.call_at(self._free + self._delay, self._other.write, data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other side too, after all bytes."""
        if self._other is not None:
            end = max(self._free, self._loop.time()) + self._delay
            # Later than the last bytes, whose time may be exactly this one.
            self._loop.call_at(end + 1e-3, self._other.close)

    async def _connect(self, host: str, port: int) -> None:
        assert self._own is not None
        try:
            transport, back = await self._loop.create_connection(
                lambda: _Direction(self._delay, self._rate, None), host, port
            )
        except OSError:
            self._own.close()
            return
        self._other, back._other = transport, self._own
        self._own.resume_reading()


async def _forward(host: str, port: int, delay: float, bytes_per_second: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Direction(delay, bytes_per_second, (host, port)), _HOST, 0
    )
    stopped = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), stopped.set)  # readable when the other end is closed
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await stopped.wait()


@contextmanager
def proxying(address: str, delay: float, gigabits: float) -> Iterator[tuple[str, int]]:
    """Run a proxy in a process of its own; give its address and the process's id.

    Args:
        address: where it connects to, as host:port.
        delay: seconds each way.
        gigabits: per second, each way.

    """
    command = [sys.executable, "-m", __spec__.name, address]
    command += ["--delay", str(delay), "--gigabits", str(gigabits)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt is the measurement's affair
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"{_HOST}:{int(process.stdout.readline())}", process.pid
    finally:
        process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    """Forward until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", help="host:port to connect to")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds each way")
    parser.add_argument("--gigabits", type=float, default=1.0, help="per second, each way")
    arguments = parser.parse_args()
    host, _, port = arguments.address.rpartition(":")
    rate = arguments.gigabits * 1e9 / 8
    asyncio.run(_forward(host, int(port), arguments.delay, rate))


if __name__ == "__main__":
    main()
