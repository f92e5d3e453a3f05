"""Everything of Flower that Chambers uses and that isn't in Flower's documented interface.

A new version of Flower may change any of it, so this list is what to read and test before the bounds
of ``flwr`` in ``pyproject.toml`` are widened. Other modules import only what ``flwr.app``,
``flwr.clientapp``, ``flwr.common``, ``flwr.serverapp`` and ``flwr.serverapp.strategy`` export;
``tests/federation/test_flower_internals.py`` checks it.

Attributes with an underscore are used in two places: ``strategies/bounded_pull.py`` replaces the
client of an ``HttpGrid``, and says why.
"""

# chambers.site.sign builds the same release from an installed package as flwr build from a checkout.
from flwr.cli.build import build_fab_from_files

# chambers site sign names the app that a release contains; chambers site check reads the node config
# of a SuperNode's command line as the SuperNode does.
from flwr.common.config import get_fab_config, get_metadata_from_config, parse_config_args

# Limits that Flower enforces, and the code of an answer that never came.
from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode

# The worker's socket, and signed messages, carry messages as bytes in Flower's own format.
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)

# chambers site check asks a SuperLink whether it knows a node key.
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto

# Replies are pulled within a limit of memory, which Flower doesn't have.
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

# What a grid tells of a node: its name and whether it is online.
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

# Flower's mean of metrics, weighted by the number of examples.
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_type_from_object_content,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

# Whether the institutions are simulated or real.
from flwr.superlink.grid import HttpGrid, InMemoryGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
