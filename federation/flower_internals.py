"""Names from Flower that aren't part of its documented interface.

A new version of Flower may change any of it: read and test this list before the bounds of ``flwr``
in ``pyproject.toml`` are widened. Other modules import only what ``flwr.app``, ``flwr.clientapp``,
``flwr.common``, ``flwr.serverapp`` and ``flwr.serverapp.strategy`` export.
``strategies/bounded_pull.py`` also replaces the private client of an ``HttpGrid``.
"""

from collections.abc import Mapping
from pathlib import Path

# chambers site sign names the app in a release; chambers site check reads a node config as a
# SuperNode does.
from flwr.common.config import get_fab_config, get_metadata_from_config, parse_config_args

# Flower's limits to the sizes of a release and of a piece of an array, and its codes of errors.
from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode

# A resident worker, and a signed message, get messages and records as bytes in Flower's format.
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)

# chambers site check asks a SuperLink whether a node key is registered; no command of Flower does.
from flwr.proto.fleet_pb2 import ActivateNodeRequest

# The formats of a resident worker's messages.
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto

# Flower reads a reply whole before the app sees it; Chambers limits the memory that one takes.
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

# The type of what a grid says of a node.
from flwr.proto.node_pb2 import NodeInfo

# The format of a signed message's records.
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

# A SuperLink hands out other messages with a reply; Chambers drops them.
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

# The strategies' mean of metrics, weighted as in Flower's own.
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

# A SuperLink's answer about a node key.
from flwr.supercore.error import ApiErrorCode, FlowerError

# The pieces of a reply, for the limit to its memory.
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_type_from_object_content,
)

# A node key in the form in which a SuperLink is asked about it.
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

# They differ in whether the institutions are simulated, which nothing else says.
from flwr.superlink.grid import HttpGrid, InMemoryGrid

# The question about a node key goes where a SuperNode's requests go, and is signed as they are.
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

__all__ = [
    "FAB_MAX_SIZE",
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",
    "ActivateNodeRequest",
    "ApiErrorCode",
    "ContextProto",
    "ErrorCode",
    "FleetHttpClient",
    "FlowerError",
    "HttpGrid",
    "InMemoryGrid",
    "MessageProto",
    "NodeAuthHttpInterceptor",
    "NodeInfo",
    "PullAppMessagesRequest",
    "PullAppMessagesResponse",
    "PullObjectRequest",
    "PullObjectResponse",
    "RecordDictProto",
    "aggregate_metricrecords",
    "build_release",
    "context_from_proto",
    "context_to_proto",
    "get_fab_config",
    "get_metadata_from_config",
    "get_object_body",
    "get_object_type_from_object_content",
    "message_from_proto",
    "message_to_proto",
    "parse_config_args",
    "public_key_to_bytes",
    "recorddict_from_proto",
    "recorddict_to_proto",
]


def build_release(files: Mapping[str, Path]) -> bytes:
    """Build a release as ``flwr build`` does, which only takes a folder.

    Args:
        files: The app's files, by their paths in the release.

    """
    # Flower's command line takes a while to import, and only chambers site sign needs it.
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files(files)[0]
