"""Pull replies from a SuperLink within a memory limit, and ignore all other messages.

Together with a reply, the SuperLink returns all messages that are addressed to the ServerApp. Any
SuperNode can send such messages, and Flower would treat them as replies.

Flower loads a complete reply before passing it to the app. An array in a reply can repeat the same
chunk any number of times, so a reply of a few megabytes could exhaust the memory.
"""

import copy
import json
import threading
from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message

from federation.flower_internals import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    HttpGrid,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    get_object_body,
    get_object_type_from_object_content,
)

_HEADER_BYTES = 1024


class LargeReplyError(ValueError):
    """A reply exceeds the memory limit of its request."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"is larger than {max_bytes / 2**20:.0f} MiB")


def pull(grid: HttpGrid, identifier: str, max_bytes: int) -> Iterable[Message]:
    """Return the reply to the message with this id if the reply has arrived.

    Raise ``LargeReplyError``, without fetching the complete reply, if it exceeds ``max_bytes``.
    """
    bounded = copy.copy(grid)
    bounded._client = _BoundedClient(grid._runtime_client, max_bytes)  # type: ignore[assignment]
    return bounded.pull_messages([identifier])


def check_reply_size(reply: Message, max_bytes: int) -> None:
    """Raise ``LargeReplyError`` if a reply's arrays together exceed ``max_bytes``.

    Data stored under several names counts once for each name.
    """
    records: Iterable[ArrayRecord] = reply.content.array_records.values()
    if sum(len(array.data) for record in records for array in record.values()) > max_bytes:
        raise LargeReplyError(max_bytes)


class _BoundedClient:
    """A SuperLink client that fetches the objects of one reply, up to a maximum size."""

    def __init__(self, client: Any, max_bytes: int) -> None:
        self._client = client
        self._most, self._taken = max_bytes, 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        """Fetch the reply's metadata, and drop messages that aren't replies to the request."""
        response: PullAppMessagesResponse = self._client.PullMessages(request)
        kept = PullAppMessagesResponse()
        for message, tree in zip(
            response.messages_list, response.message_object_trees, strict=True
        ):
            if message.metadata.reply_to_message_id in request.message_ids:
                kept.messages_list.append(message)
                kept.message_object_trees.append(tree)
        return kept

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        """Fetch an object; Flower calls this from several threads."""
        response: PullObjectResponse = self._client.PullObject(request)
        with self._lock:
            self._taken += _memory_of(response.object_content, self._most)
            if self._taken > self._most:
                raise LargeReplyError(self._most)
        return response


def _memory_of(content: bytes, max_bytes: int) -> int:
    """Return the size of an object in bytes, including repeated chunks of an array."""
    size = len(content)
    if not content:
        return size
    kind = get_object_type_from_object_content(content)
    if kind == "ArrayChunk" and size > FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + _HEADER_BYTES:
        return max_bytes + 1
    if kind == Array.__qualname__:
        pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        size += (len(pieces) - len(set(pieces))) * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    return size
