"""Split learning (FL-GLM), independent of Flower.

``load_body`` loads a model's middle blocks, and ``BlockServer`` runs them for clients. ``connect``
opens a lane (an encrypted connection) to this server, over which a client trains or evaluates the
split model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split.client.connecting import connect
    from split.server.block_server import BlockServer
    from split.server.body import load_body

__all__ = ["BlockServer", "connect", "load_body"]
_IN = {"BlockServer": "server.block_server", "connect": "client.connecting"}
_IN["load_body"] = "server.body"


def __getattr__(name: str) -> Any:
    """Import a name on first use: most of the package needs neither PyTorch nor gRPC."""
    if name in _IN:
        return getattr(import_module(f"split.{_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
