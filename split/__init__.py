"""Split learning (FL-GLM), independent of Flower.

``serve`` loads a model's middle blocks and runs them for clients. ``connect`` opens a lane (an
encrypted connection) to this server, over which a client trains or evaluates the split model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split.client.connecting import connect
    from split.server.serving import serve

__all__ = ["connect", "serve"]


def __getattr__(name: str) -> Any:
    """Import a function on first use: most of the package needs neither PyTorch nor gRPC."""
    if name == "connect":
        from split.client.connecting import connect

        return connect
    if name == "serve":
        from split.server.serving import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
