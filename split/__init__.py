"""Split learning (FL-GLM), independent of Flower.

``BlockServer`` runs a model's middle blocks for clients, which open lanes to it with ``connect``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split.client.connecting import connect as connect
    from split.model.adapters import join_adapters as join_adapters
    from split.model.adapters import take_apart as take_apart
    from split.model.loading import load_parts as load_parts
    from split.model.partition import partition_of as partition_of
    from split.protocol.training import RoundPlan as RoundPlan
    from split.server.block_server import BlockServer as BlockServer
    from split.server.body import load_body as load_body
    from split.settings import SplitSettings as SplitSettings

_IN = {"BlockServer": "server.block_server", "RoundPlan": "protocol.training"}
_IN |= {"SplitSettings": "settings", "connect": "client.connecting", "load_body": "server.body"}
_IN |= {"join_adapters": "model.adapters", "take_apart": "model.adapters"}
_IN |= {"load_parts": "model.loading", "partition_of": "model.partition"}


def __getattr__(name: str) -> Any:  # most of the package needs neither PyTorch nor gRPC
    if name in _IN:
        return getattr(import_module(f"split.{_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
