"""Messages that an institution with a registered key sends in the names of other nodes.

python member.py HOST:PORT authority.pem NODE_KEY NODE_ID MESSAGE… [announce OBJECT_ID…]

Each MESSAGE is a serialised Flower message in base64, stored unchanged with ``push-messages``.
Objects are announced as the content of the last message, with children that don't exist.
"""

import base64
import json
import sys
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


def push(client: FleetHttpClient, node: Node, text: str, announced: list[str]) -> None:
    """Store a message, whatever sender it names, or announce objects as its content."""
    message = message_from_proto(MessageProto.FromString(base64.b64decode(text)))
    message.metadata.__dict__["_message_id"] = message.object_id
    response = client.PushMessages(
        PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[tree_of(message.object_id, announced)]
            if announced
            else [get_object_tree(message)],
        )
    )
    if announced:
        return
    store = make_push_object_fn_protobuf(
        push_object_protobuf=client.PushObject,
        node=node,
        run_id=message.metadata.run_id,
        session_id=response.session_id,
    )
    objects = get_all_nested_objects(message)
    push_objects(objects, store, object_ids_to_push=set(response.objects_to_push))


def tree_of(identifier: str, announced: list[str]) -> ObjectTree:
    """Return a tree of objects, each of which has a child."""
    children = [
        ObjectTree(object_id=name, children=[ObjectTree(object_id=64 * "0")]) for name in announced
    ]
    return ObjectTree(object_id=identifier, children=children)


def main(address: str, authority: str, key_file: str, node_id: str, *words: str) -> None:
    """Send all messages, and print the answers as JSON."""
    end = words.index("announce") if "announce" in words else len(words)
    messages, announced = words[:end], list(words[end + 1 :])
    key = load_ssh_private_key(Path(key_file).read_bytes(), password=None)
    interceptor = NodeAuthHttpInterceptor(key, key.public_key())
    client = FleetHttpClient.from_server_address(
        address, False, Path(authority).read_bytes(), interceptors=[interceptor]
    )
    answers = []
    for number, text in enumerate(messages, start=1):
        last = announced if number == len(messages) else []
        try:
            push(client, Node(node_id=int(node_id)), text, last)
            answers.append("stored")
        except httpx.HTTPStatusError as error:
            answers.append(f"{error.response.status_code} {error.response.text}")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
