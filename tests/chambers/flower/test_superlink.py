"""Which messages of SuperNodes ``chambers-superlink`` stores; tests/deployment sends them."""

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node

from chambers.flower.superlink import find_message_problem


def request(count=1, trees=1, **changed):
    values = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "a"} | changed
    return PushMessagesRequest(
        node=Node(node_id=7),
        messages_list=[Message(metadata=Metadata(**values))] * count,
        message_object_trees=[ObjectTree()] * trees,
    )


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (request(), ""),
        (request(reply_to_message_id=""), "node 7 sent a message to node 1 that is not a reply"),
        (request(dst_node_id=8), "node 7 sent a message to node 8 that is not a reply"),
        (request(src_node_id=1), "node 7 sent a message in the name of node 1"),
        (request(src_node_id=8), "node 7 sent a message in the name of node 8"),
        (request(0, 0), "node 7 sent 0 messages instead of one"),
        (request(0, 1), "node 7 sent 0 messages instead of one"),
        (request(2, 1), "node 7 sent 2 messages instead of one"),
        (request(1, 0), "node 7 sent 1 messages instead of one"),
        (PullMessagesRequest(), "it is not a request to store a message"),
        (None, "it is not a request to store a message"),
    ],
)
def test_nodes_can_only_store_own_replies_to_the_coordinator(sent, problem):
    assert find_message_problem(sent) == problem
