"""Send messages to SuperNodes and receive the replies, which may be malformed or malicious."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice
from logging import WARNING

import httpx
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import AuthenticationError, Signer, Statement, open_reply
from federation.flower_internals import ErrorCode, HttpGrid, InMemoryGrid
from federation.messages import problem_of
from federation.packed_content import EncryptedArrays
from strategies.bounded_pull import LargeReplyError, check_reply_size, pull
from strategies.silence import SilentClients

# Polling interval for grids without a ``pull_interval``; Flower's simulation grid has one.
_PULL_SECONDS = 3.0
# Time to wait for a reply before polling the other clients.
_PATIENCE_SECONDS = 5.0
# Maximum number of attempts to push a message; each attempt uses different objects.
_MAX_PUSHES = 3
# Maximum number of unanswered messages in a simulation, which has at most 32 actors: Flower checks
# all of them for each node, so that 1,000 messages to 1,000 nodes would keep a core busy.
_MAX_IN_FLIGHT = 64
# Size limit of a reply without arrays: names, digests of tensors, answers as text.
_MAX_REPLY_BYTES = 2**26
_GONE = "its SuperNode is no longer connected"
_KILLED = (
    "its process was ended, because the machine ran out of memory: lower train.batch-size or "
    "data.max-length, or simulate fewer clients"
)


@dataclass(frozen=True)
class _Request:
    """A sent message."""

    metadata: Metadata
    statement: Statement | None  # None if the message isn't signed
    max_bytes: int  # maximum size of the reply in memory


class Unanswered:
    """The sent messages to which no reply has been pulled yet."""

    def __init__(self, grid: Grid) -> None:
        self.requests: dict[str, _Request] = {}  # by message id
        self._grid = grid
        self._pulls: dict[str, Future[list[Message]]] = {}

    def poll(self, patience: float = 0.0) -> Iterator[Message]:
        """Yield the replies that have arrived, as described for ``exchange``.

        ``patience`` is the time in seconds to wait for the rest of a reply that is being pulled.
        """
        pulls = self._pulls
        for identifier, request in list(self.requests.items()):
            if identifier not in pulls:
                pulls[identifier] = _begin_pull(self._grid, identifier, request)
            if wait([pulls[identifier]], patience).not_done:
                continue
            replies = pulls.pop(identifier).result()
            if replies:
                del self.requests[identifier]
            while replies:
                yield replies.pop()


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    timeout: float,
    signer: Signer | None = None,
    array_bytes: int = 0,
    on_poll: Callable[[], None] = lambda: None,
    unanswered: Unanswered | None = None,
    silent: SilentClients | None = None,
) -> Iterator[Message]:
    """Send messages, and yield each reply as it arrives.

    If a message can't be sent, its reply can't be read or has the wrong sender, or ``silent``
    notices that the client is gone, yield an error instead, with the addressed client as its
    sender. Replies are pulled one at a time, so only one is in memory if the caller keeps no
    references. A reply that hasn't completely reached the SuperLink is pulled in the background: a
    client that never finishes doesn't delay the others.

    There is at most one message per client, and each client has ``timeout`` seconds to reply. With
    a ``signer``, messages are signed, and replies must be authenticated. ``array_bytes`` is the
    expected size of the arrays in a reply. ``on_poll`` is called each time all clients have been
    polled. Afterwards, ``unanswered`` contains the messages whose replies are late.
    """
    unanswered = unanswered or Unanswered(grid)
    sent = list(messages)
    end = time.monotonic() + timeout * turns(grid, len(sent))
    max_bytes = 2 * array_bytes + _MAX_REPLY_BYTES
    unsent = len(sent)
    # Requesting one more than exist exhausts the generator, which then releases the messages.
    most = _MAX_IN_FLIGHT if isinstance(grid, InMemoryGrid) else unsent + 1
    pushed = _push_all(grid, sent, signer, max_bytes)
    del sent
    while unanswered.requests or unsent:
        is_late = time.monotonic() >= end
        for identifier, request in islice(pushed, most - len(unanswered.requests)):
            unsent -= 1
            if identifier:
                unanswered.requests[identifier] = request
            else:
                yield _failed(request.metadata, "the message to it could not be sent")
        yield from unanswered.poll()
        if is_late:
            return
        on_poll()
        if silent:
            asked = {r.metadata.dst_node_id: key for key, r in unanswered.requests.items()}
            for node in silent.look(asked):
                request = unanswered.requests.pop(asked[node])
                yield _failed(request.metadata, _GONE, ErrorCode.NODE_UNAVAILABLE)
        if unanswered.requests:
            time.sleep(getattr(grid, "pull_interval", _PULL_SECONDS))


def _push_all(
    grid: Grid, messages: list[Message], signer: Signer | None, max_bytes: int
) -> Iterator[tuple[str | None, _Request]]:
    """Push messages; yield each message's id (None if it could not be pushed) and its request.

    Each message is pushed to a SuperLink in a separate request: if one message of a request were
    refused, the SuperLink would already have stored the other messages without their content, and
    the recipients would wait for the content.
    """
    shared = EncryptedArrays()
    one_by_one = isinstance(grid, HttpGrid | InMemoryGrid)
    groups = [[each] for each in messages] if one_by_one else [messages]
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
                # An attacker may have blocked these objects (see federation.packed_content). New
                # keys give the next attempt's objects new ids.
                shared = EncryptedArrays()
        for message, statement in zip(group, statements, strict=True):
            identifier = message.metadata.message_id
            yield (
                identifier if identifier in pushed else None,
                _Request(message.metadata, statement, max_bytes),
            )


def _begin_pull(grid: Grid, identifier: str, request: _Request) -> Future[list[Message]]:
    """Start to pull the reply to a request, and wait briefly for it.

    The SuperLink announces a reply before it has received all of its objects. Flower waits for the
    missing objects as long as the client keeps sending any, so the pull gets its own thread.
    """
    future: Future[list[Message]] = Future()

    def run() -> None:
        try:
            future.set_result(_pull(grid, identifier, request))
        except Exception as error:
            future.set_exception(error)

    if isinstance(grid, HttpGrid):
        thread = threading.Thread(target=run, name="reply", daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
    else:
        run()
    return future


def _pull(grid: Grid, identifier: str, request: _Request) -> list[Message]:
    """Return a request's reply in a list, which is empty if there is no reply."""
    try:
        replies = (
            pull(grid, identifier, request.max_bytes)
            if isinstance(grid, HttpGrid)
            else grid.pull_messages([identifier])
        )
        return [_from_client(reply, request) for reply in replies]
    except httpx.HTTPError:  # an error of the SuperLink, not of the client
        raise
    except LargeReplyError as error:
        return [_failed(request.metadata, f"its reply {error}")]
    except Exception as error:  # untrusted objects can make Flower raise anything
        reason = f"its reply can't be read ({type(error).__name__})"
        return [_failed(request.metadata, reason)]


def _from_client(reply: Message, request: _Request) -> Message:
    """Authenticate a reply; attribute an error from the SuperLink to the addressed client.

    The SuperLink authenticates the SuperNode that delivers a reply, but not the sender that the
    reply names.
    """
    asked = request.metadata
    is_sender = reply.metadata.src_node_id == asked.dst_node_id
    if reply.has_error():
        code, reason = reply.error.code, reply.error.reason
        if code == ErrorCode.NODE_UNAVAILABLE:
            reason = _GONE
        elif "OutOfMemoryError" in (reason or ""):
            reason = _KILLED
        return _failed(asked, reason or "", code)
    if not is_sender:
        return _failed(asked, "its reply names a different sender")
    check_reply_size(reply, request.max_bytes)
    if request.statement is not None:
        try:
            open_reply(reply, request.statement)
        except AuthenticationError as error:
            problem = problem_of(reply)
            claim = f"; it says: {problem}" if problem else ""
            return _failed(asked, f"its reply is refused: {error}{claim}")
    return reply


def _failed(request: Metadata, reason: str, code: int = ErrorCode.UNKNOWN) -> Message:
    """Return an error in the form of a reply from the addressed client."""
    asked = Message(RecordDict(), request.dst_node_id, request.message_type)
    return Message(Error(code, reason), reply_to=asked)


def turns(grid: Grid, clients: int) -> int:
    """Return the maximum number of clients that may have to run one after another.

    A simulation may have fewer actors than clients. Messages then wait in Flower's queue, and a
    client's time limit begins when its message is taken from the queue. Flower doesn't expose the
    number of actors, so one actor is assumed. In a deployment, each client has its own machine.
    """
    return max(1, clients) if isinstance(grid, InMemoryGrid) else 1
