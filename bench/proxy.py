"""A TCP proxy that simulates a slower line, with a one-way delay and a limited rate.

Received bytes are forwarded when the line would have delivered the last of them: the delay costs no
throughput, and each direction has the full rate. On both sides of the proxy, TCP's slow start is as
on the loopback. The slow start of a real long line, which ends after a few round trips with gRPC's
large windows, is not measured.
"""

import asyncio
from multiprocessing.connection import Connection
from typing import cast

_HOST = "127.0.0.1"


class _Direction(asyncio.Protocol):
    """Forward bytes from one side to the other after the line's delay.

    An incoming connection has a ``target``, the host and port to which its bytes are forwarded.
    """

    def __init__(self, delay: float, rate: float, target: tuple[str, int] | None) -> None:
        self._delay, self._rate, self._target = delay, rate, target  # seconds, and bytes per second
        self._loop = asyncio.get_running_loop()
        self._own: asyncio.Transport | None = None
        self._other: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._free = 0.0  # time when the line has capacity again

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect the other side of an incoming connection."""
        self._own = cast(asyncio.Transport, transport)
        if self._target is not None:
            self._own.pause_reading()
            self._connecting = self._loop.create_task(self._connect(*self._target))

    def data_received(self, data: bytes) -> None:
        """Schedule the delivery of the bytes to the other side."""
        if self._other is not None:
            self._free = max(self._free, self._loop.time()) + len(data) / self._rate
            self._loop.call_at(self._free + self._delay, self._other.write, data)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other side too, after all bytes are delivered."""
        if self._other is not None:
            end = max(self._free, self._loop.time()) + self._delay
            # Slightly later than the last bytes, which may be scheduled for exactly this time.
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


def forward(link: Connection, address: str, delay: float, gigabits: float) -> None:
    """Run a proxy until the pipe is closed; send its address, and nothing else, over the pipe.

    Args:
        link: Pipe to the measuring process.
        address: Address of the server, as host:port.
        delay: Delay each way, in seconds.
        gigabits: Rate each way, in Gbit/s.

    """
    asyncio.run(_forward(link=link, address=address, delay=delay, rate=gigabits * 1e9 / 8))


async def _forward(link: Connection, address: str, delay: float, rate: float) -> None:
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    server = await loop.create_server(lambda: _Direction(delay, rate, (host, int(port))), _HOST, 0)
    stopped = asyncio.Event()
    loop.add_reader(link.fileno(), stopped.set)  # readable when the other end is closed
    link.send(f"{_HOST}:{server.sockets[0].getsockname()[1]}")
    await stopped.wait()  # connections that are still open end with the process
