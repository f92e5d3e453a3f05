"""``chambers-superlink``: Flower's SuperLink, which accepts from SuperNodes only their own replies.

Flower authenticates the SuperNode that sends a request, but not the message in it. Otherwise, the
holder of a node key could send instructions in the coordinator's name, keep a SuperNode waiting for
objects that never come, answer for others, and fill the database with messages to itself.
"""

from logging import WARNING

from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.superlink import main as superlink
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/v1/fleet/push-messages"


class RepliesOnly:
    """ASGI middleware behind Flower's authentication of nodes: refuse messages but own replies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 400."""
        if scope["type"] == "http" and scope["path"] == PATH:
            request = Request(scope)
            problem = find_message_problem(getattr(request.state, "protobuf_request", None))
            if problem:
                address = request.headers.get("x-forwarded-for", "")
                log(WARNING, "refused a message from %s: %s", address or "an address", problem)
                await JSONResponse({"detail": problem}, 400)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def find_message_problem(request: object) -> str:
    """Return why a request to store a message is refused; empty if it isn't.

    ``request`` must come from the node that it names, which Flower has checked. The SuperLink
    itself refuses replies to messages that weren't for that node.
    """
    if not isinstance(request, PushMessagesRequest):
        return "it is not a request to store a message"
    node = f"node {request.node.node_id} sent "
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return f"{node}{len(request.messages_list)} messages instead of one"
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        return f"{node}a message in the name of node {metadata.src_node_id}"
    if not metadata.reply_to_message_id or metadata.dst_node_id != SUPERLINK_NODE_ID:
        return f"{node}a message to node {metadata.dst_node_id} that is not a reply"
    return ""


def main() -> None:
    """Run the SuperLink with Flower's options."""
    original = superlink._get_middleware
    superlink._get_middleware = lambda: [*original(), Middleware(RepliesOnly)]
    flower_superlink()
