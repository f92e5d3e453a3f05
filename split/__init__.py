"""Split learning (FL-GLM), independent of Flower.

``serve`` loads the middle blocks and serves them. ``connect`` opens a lane (an encrypted
connection) to these blocks; a client uses the lane to train and evaluate with its own blocks.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split.client.connecting import connect
    from split.server.serving import serve

__all__ = ["connect", "serve"]


def __getattr__(name: str) -> Any:
    """Import on first use, because most of the package needs neither PyTorch nor gRPC."""
    if name == "connect":
        from split.client.connecting import connect

        return connect
    if name == "serve":
        from split.server.serving import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
