"""A TCP proxy that simulates a slower line, with a one-way delay and a limited rate.

Received bytes are forwarded when the line would have delivered the last of them, so the delay costs
no throughput. Each direction has the full rate. TCP's slow start on a real long line, which ends
after a few round trips with gRPC's large windows, is not simulated.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from threading import Thread

from split.address import parse_address

_HOST = "127.0.0.1"
_AT_ONCE = 2**20  # maximum bytes to read at once


class Proxy:
    """A proxy in a thread of this process, for the server at ``address`` (host:port).

    ``delay`` is in seconds, and the rate ``gigabits`` in Gbit/s, each way.
    """

    def __init__(self, address: str, delay: float, gigabits: float) -> None:
        self._target = parse_address(address)
        self._delay, self._rate = delay, gigabits * 1e9 / 8  # in seconds and bytes per second
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        listening = asyncio.start_server(self._connect, _HOST, 0, limit=_AT_ONCE)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()

    def address(self) -> str:
        """Return the proxy's own address."""
        return f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection(*self._target, limit=_AT_ONCE)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._carry(reader, far), self._carry(answers, writer))

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Forward all data after the line's delay, and then close the connection."""
        free = 0.0  # time at which the line has finished sending
        try:
            while data := await reader.read(_AT_ONCE):
                free = max(free, self._loop.time()) + len(data) / self._rate
                self._loop.call_at(free + self._delay, writer.write, data)
        finally:
            # Close a millisecond after the last bytes are due, so that they are written first.
            end = max(free, self._loop.time()) + self._delay + 1e-3
            self._loop.call_at(end, writer.close)
