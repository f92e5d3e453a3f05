"""Imports from Flower that aren't part of its documented interface.

A new version of Flower may change any of these names: test them before widening the version bounds
of ``flwr`` in ``pyproject.toml``. Other modules import only names exported by ``flwr.app``,
``flwr.clientapp``, ``flwr.common``, ``flwr.serverapp`` and ``flwr.serverapp.strategy``.
``strategies/bounded_pull.py`` also replaces the private client of an ``HttpGrid``, and the programs
in ``chambers/flower`` import what they replace in Flower's programs.
"""

# Other modules import these names from here.
# ruff: noqa: F401
# mypy: implicit-reexport

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

# `chambers site sign` reads an app's name from a release.
from flwr.common.config import get_fab_config, get_metadata_from_config

# Flower's size limits for a release and for a chunk of an array, and its error codes.
from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode

# Serialisation of messages for the resident worker, and of records in signed messages.
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)

# `chambers site nodes` lists names and keys, which `flwr supernode list` doesn't; `chambers stop`
# finds the run in progress.
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)

# `chambers site check` asks a SuperLink whether a node key is registered; no Flower command does.
from flwr.proto.fleet_pb2 import ActivateNodeRequest

# Serialisation formats for the resident worker.
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto

# Flower loads a complete reply before passing it to the app; Chambers limits the reply's size.
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

# Type of the node information that a grid or a SuperLink returns.
from flwr.proto.node_pb2 import NodeInfo

# Serialisation format of the records in a signed message.
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

# A SuperLink may return other messages together with a reply; Chambers drops them.
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

# `chambers site nodes` and `chambers stop` connect as `flwr` does.
from flwr.supercore.control import ControlHttpClient

# Errors that a SuperLink returns for a node key.
from flwr.supercore.error import ApiErrorCode, FlowerError

# Parsing of the objects in a reply, to limit the memory that the reply uses.
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_type_from_object_content,
)

# Encoding of a node key in requests to a SuperLink.
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

# Sets the run and node that messages created in this process belong to.
from flwr.supercore.task_identity import TaskIdentity

# Only the class of the grid shows whether the institutions are simulated.
from flwr.superlink.grid import HttpGrid, InMemoryGrid

# `chambers site check` sends requests signed with a node key, as a SuperNode does.
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


def build_release(files: Mapping[str, Path]) -> bytes:
    """Build a release from files, keyed by their paths in it (``flwr build`` needs a folder)."""
    # Importing Flower's command line is slow, and only `chambers site sign` needs it.
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files(files)[0]


@contextmanager
def control_client() -> Iterator[ControlHttpClient]:
    """Connect to the deployment as ``flwr`` does; its errors are ``click.ClickException``."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection

    with redirect_stdout(sys.stderr):  # it prints the connection
        client = init_http_client_from_connection(read_superlink_connection("deployment"))
    try:
        with flwr_cli_exc_handler():
            yield client
    finally:
        client.close()
