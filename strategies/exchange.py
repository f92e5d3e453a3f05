"""Send messages to SuperNodes, and receive what comes from them, whatever it is."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from logging import WARNING

import httpx
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import (
    AuthenticationError,
    Signer,
    Statement,
    open_reply,
)
from federation.flower_internals import ErrorCode, HttpGrid, InMemoryGrid
from federation.messages import problem_of
from federation.packed_content import EncryptedArrays
from strategies.bounded_pull import LargeReplyError, check_size, pull

# By whether the clients are simulated, as Flower's own grids poll.
_PULL_SECONDS = {False: 3.0, True: 0.1}
# For a reply that the SuperLink has, whatever its size, before the other clients are polled.
_PATIENCE_SECONDS = 5.0
# Of a message that the SuperLink refuses; each time with other objects.
_MAX_PUSHES = 3
# Of a reply without arrays: names, digests of tensors, answers as text.
_MAX_REPLY_BYTES = 2**26


@dataclass(frozen=True)
class _Request:
    """A message that was sent.

    Attributes:
        metadata: Its metadata.
        statement: The signed statement about it, if it was signed.
        max_bytes: Memory that the reply may take.

    """

    metadata: Metadata
    statement: Statement | None
    max_bytes: int


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    timeout: float,
    signer: Signer | None = None,
    array_bytes: int = 0,
    on_poll: Callable[[], None] = lambda: None,
) -> Iterator[Message]:
    """Send messages, and yield each reply as it arrives, as from the client that was asked.

    An error takes the place of a reply that can't be read, or that someone else has made, and of
    one to a message that could not be sent. Replies are pulled one at a time, and no reference to
    them is kept: if the caller keeps none either, only one is in memory. Only a reply that is still
    on its way to the SuperLink is pulled beside others, so that a client that doesn't finish
    sending it delays nobody.

    Args:
        grid: Connects to the SuperNodes.
        messages: Messages, at most one to each client.
        timeout: Seconds that each client has.
        signer: Signs the messages, whose replies must then be authenticated; None if they aren't.
        array_bytes: Bytes of the arrays that each reply has.
        on_poll: Called after each time that all clients were polled.

    """
    sent = list(messages)
    end = time.monotonic() + timeout * turns(grid, len(sent))
    waiting: dict[str, _Request] = {}
    max_bytes = 2 * array_bytes + _MAX_REPLY_BYTES
    for identifier, request in _push_all(grid, sent, signer, max_bytes):
        if identifier:
            waiting[identifier] = request
        else:
            yield _failed(request.metadata, "the message to it could not be sent")
    sent.clear()
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


def _push_all(
    grid: Grid, messages: list[Message], signer: Signer | None, max_bytes: int
) -> Iterator[tuple[str | None, _Request]]:
    """Push messages; yield the id of each, or None if it could not be pushed.

    A SuperLink gets them one by one: if it refuses one, it has stored the others of the same
    request without their content, for which their recipients would wait.
    """
    shared = EncryptedArrays()
    groups = [[each] for each in messages] if isinstance(grid, HttpGrid) else [messages]
    for group in groups:
        contents = [message.content for message in group]
        for attempt in range(1, _MAX_PUSHES + 1):
            for message, content in zip(group, contents, strict=True):
                message.content = content
            statements = [signer.sign(each, shared) if signer else None for each in group]
            try:
                pushed = set(grid.push_messages(group))
                break
            except httpx.HTTPStatusError as error:
                pushed = set()
                log(WARNING, "A message could not be pushed (attempt %d): %s", attempt, error)
                # Someone may have announced its objects, with other children.
                shared = EncryptedArrays()
        for message, statement in zip(group, statements, strict=True):
            identifier = message.metadata.message_id
            yield (
                identifier if identifier in pushed else None,
                _Request(message.metadata, statement, max_bytes),
            )


class _Pull(threading.Thread):
    """Pulls the reply to a request, if there is one.

    The SuperLink announces a reply before it has all of its objects, and Flower waits for them for
    as long as the client sends any.
    """

    def __init__(self, grid: Grid, identifier: str, request: _Request) -> None:
        super().__init__(name="reply", daemon=True)
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


def _pull(grid: Grid, identifier: str, request: _Request) -> list[Message]:
    """Return the reply to a request if there is one."""
    try:
        replies = (
            pull(grid, identifier, request.max_bytes)
            if isinstance(grid, HttpGrid)
            else grid.pull_messages([identifier])
        )
        return [_from_client(reply, request) for reply in replies]
    except httpx.HTTPError:  # the SuperLink's, not the client's
        raise
    except LargeReplyError as error:
        return [_failed(request.metadata, f"its reply {error}")]
    except Exception as error:  # untrusted objects can make Flower raise anything
        reason = f"its reply can't be read ({type(error).__name__})"
        return [_failed(request.metadata, reason)]


def _from_client(reply: Message, request: _Request) -> Message:
    """Return a reply; an error that the SuperLink has sent in a client's place, as the client's.

    The SuperLink compares the sender with the client that was asked only on the envelope, which the
    grid drops; the client has written the one inside.
    """
    asked = request.metadata
    if reply.metadata.src_node_id == asked.dst_node_id:
        return _authentic(reply, request)
    if not reply.has_error():
        return _failed(asked, "its reply names another sender")
    code, reason = reply.error.code, reply.error.reason
    if code == ErrorCode.NODE_UNAVAILABLE:
        reason = "its SuperNode is no longer connected"
    return _failed(asked, reason or "", code)


def _authentic(reply: Message, request: _Request) -> Message:
    """Return a reply that the client has authenticated, or an error; if that is required."""
    if reply.has_error():
        return reply
    check_size(reply, request.max_bytes)
    if request.statement is None:
        return reply
    try:
        open_reply(reply, request.statement)
    except AuthenticationError as error:
        problem = problem_of(reply)
        claim = f"; it says: {problem}" if problem else ""
        return _failed(request.metadata, f"its reply is refused: {error}{claim}")
    return reply


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
