"""A reply that is announced but never sent: Flower's grid waits for it, but ours must not."""

import time
from types import SimpleNamespace

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid import HttpGrid

from strategies.exchange import exchange

STALLED, HONEST = 1, 2


class SuperLink:
    """A SuperLink stand-in with one client's complete reply, and none of the other's objects."""

    def __init__(self, messages):
        self._messages, self._asked, self._objects = messages, {}, {}
        self.waits = True

    def PushMessages(self, request):  # noqa: N802 - Flower's names
        asked = {m.metadata.message_id: m.metadata for m in request.messages_list}
        self._asked |= asked
        return PushAppMessagesResponse(message_ids=list(asked))

    def PushObject(self, request):  # noqa: N802
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):  # noqa: N802
        (identifier,) = request.message_ids
        node = self._asked[identifier].dst_node_id
        asked = next(m for m in self._messages if m.metadata.dst_node_id == node)
        reply = Message(RecordDict({"config": ConfigRecord({"node": node})}), reply_to=asked)
        reply.metadata.__dict__["_src_node_id"] = node
        reply.metadata.__dict__["_message_id"] = reply.object_id
        if node == HONEST:
            found = get_all_nested_objects(reply).items()
            self._objects |= {name: each.deflate() for name, each in found}
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )

    def PullObject(self, request):  # noqa: N802
        content = self._objects.get(request.object_id)
        return PullObjectResponse(
            object_found=self.waits,
            object_available=content is not None,
            object_content=content or b"",
        )

    def ConfirmMessageReceived(self, request):  # noqa: N802
        return ConfirmMessageReceivedResponse()


def test_others_are_polled_and_the_time_limit_holds(one_run, monkeypatch):
    monkeypatch.setattr("strategies.exchange._PATIENCE_SECONDS", 0.3)
    messages = [Message(RecordDict(), n, MessageType.TRAIN, ttl=60.0) for n in (STALLED, HONEST)]
    grid = HttpGrid(token="token")
    grid._client = SuperLink(messages)
    grid._run = SimpleNamespace(run_id=1)
    started = time.monotonic()
    (reply,) = exchange(grid, list(messages), timeout=2.0)
    grid._client.waits = False
    assert reply.content["config"]["node"] == HONEST
    assert time.monotonic() - started < 10.0
