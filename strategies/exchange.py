"""Send messages to SuperNodes, and receive what comes from them, whatever it is."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import httpx
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid, InMemoryGrid

# By whether the clients are simulated, as Flower's own grids poll.
_PULL_SECONDS = {False: 3.0, True: 0.1}
# For a reply that the SuperLink has, whatever its size, before the other clients are polled.
_PATIENCE_SECONDS = 5.0


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    timeout: float,
    on_poll: Callable[[], None] = lambda: None,
) -> Iterator[Message]:
    """Send messages, and yield each reply as it arrives, as from the client that was asked.

    An error takes the place of a reply that can't be read, and of one to a message that could not
    be sent. Replies are pulled one at a time, and no reference to them is kept: if the caller keeps
    none either, only one is in memory. Only a reply that is still on its way to the SuperLink is
    pulled beside others, so that a client that doesn't finish sending it delays nobody.

    Args:
        grid: Connects to the SuperNodes.
        messages: Messages, at most one to each client.
        timeout: Seconds that each client has.
        on_poll: Called after each time that all clients were polled.

    """
    sent = list(messages)
    requests = [message.metadata for message in sent]
    end = time.monotonic() + timeout * turns(grid, len(sent))
    # Grids give each message its id; they return those of the messages that could be pushed.
    pushed = set(grid.push_messages(sent))
    waiting = {each.message_id: each for each in requests if each.message_id in pushed}
    sent.clear()
    for request in requests:
        if request.message_id not in waiting:
            yield _failed(request, "the message to it could not be sent")
    pulls: dict[str, _Pull] = {}
    while waiting:
        is_late = time.monotonic() >= end
        for identifier, request in list(waiting.items()):
            if identifier not in pulls:
                pulls[identifier] = _Pull(grid, identifier, request)
                pulls[identifier].begin()
            if pulls[identifier].is_alive():
                continue
            replies = pulls.pop(identifier).take()
            if replies:
                del waiting[identifier]
            while replies:
                yield replies.pop()
        if is_late:
            return
        on_poll()
        if waiting:
            time.sleep(_PULL_SECONDS[isinstance(grid, InMemoryGrid)])


class _Pull(threading.Thread):
    """Pulls the reply to a request, if there is one.

    The SuperLink announces a reply before it has all of its objects, and Flower waits for them for
    as long as the client sends any.
    """

    def __init__(self, grid: Grid, identifier: str, request: Metadata) -> None:
        super().__init__(name=f"reply of node {request.dst_node_id}", daemon=True)
        self._grid = grid
        self._identifier = identifier
        self._request = request
        self._replies: list[Message] = []
        self._error: Exception | None = None

    def begin(self) -> None:
        """Pull, and wait a little for the end; other grids than Flower's own never wait."""
        if isinstance(self._grid, HttpGrid):
            self.start()
            self.join(_PATIENCE_SECONDS)
        else:
            self.run()

    def run(self) -> None:
        """Pull."""
        try:
            self._replies = _pull(self._grid, self._identifier, self._request)
        except Exception as error:
            self._error = error

    def take(self) -> list[Message]:
        """Return what was pulled, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._replies


def _pull(grid: Grid, identifier: str, request: Metadata) -> list[Message]:
    """Return the reply to a request if there is one."""
    try:
        return [_from_client(reply, request) for reply in grid.pull_messages([identifier])]
    except httpx.HTTPError:  # the SuperLink's, not the client's
        raise
    except Exception as error:  # untrusted objects can make Flower raise anything
        return [_failed(request, f"its reply can't be read ({type(error).__name__})")]


def _from_client(reply: Message, request: Metadata) -> Message:
    """Return a reply; an error that the SuperLink has sent in a client's place, as the client's.

    The SuperLink compares the sender with the client that was asked only on the envelope, which the
    grid drops; the client has written the one inside.
    """
    if reply.metadata.src_node_id == request.dst_node_id:
        return reply
    if not reply.has_error():
        return _failed(request, "its reply names another sender")
    code, reason = reply.error.code, reply.error.reason
    if code == ErrorCode.NODE_UNAVAILABLE:
        reason = "its SuperNode is no longer connected"
    return _failed(request, reason or "", code)


def _failed(request: Metadata, reason: str, code: int = ErrorCode.UNKNOWN) -> Message:
    """Return an error as the reply of the client that was asked."""
    asked = Message(RecordDict(), request.dst_node_id, request.message_type)
    return Message(Error(code, reason), reply_to=asked)


def turns(grid: Grid, clients: int) -> int:
    """Return the largest number of clients that may have to work one after another.

    A simulation may have fewer actors than clients: messages then wait in Flower's queue, and a
    client's own time begins when its message is taken from the queue. Flower doesn't expose the
    number of actors, so one is assumed. In a deployment each client has its own machine.
    """
    return max(1, clients) if isinstance(grid, InMemoryGrid) else 1
