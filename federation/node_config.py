"""A SuperNode's configuration: the name of the institution and the paths of its files."""

import sys
from collections.abc import Mapping
from pathlib import Path

from federation.messages import is_name
from federation.run_config import Scalar
from federation.site_policy import PolicyError
from finetuning.data.formats import DataError

_KEYS = ("name", "data-path", "policy", "worker")
# Keys that Flower sets in simulations.
_PARTITION_KEYS = {"partition-id", "num-partitions"}
# Name of the program that a SuperNode, or its SuperExec, starts to run a ClientApp.
_DEPLOYED = "flwr-clientapp"


def check_keys(node: Mapping[str, Scalar]) -> None:
    """Raise ``PolicyError`` for unknown keys: a misspelled ``policy`` must not be ignored."""
    unknown = sorted(node.keys() - {*_KEYS, *_PARTITION_KEYS})
    if unknown:
        raise PolicyError(
            f"--node-config has unknown keys ({', '.join(unknown)}); the keys are "
            f"{', '.join(_KEYS)} (docs/policy.md)"
        )


def is_simulation(node: Mapping[str, Scalar]) -> bool:
    """Return whether a client is simulated, and so has no rows of its own.

    Flower's examples also pass the partition keys to real SuperNodes, which aren't simulated.
    """
    return node.keys() == _PARTITION_KEYS and Path(sys.argv[0]).name != _DEPLOYED


def name_and_data_path(node: Mapping[str, Scalar]) -> tuple[str, Path]:
    """Return the ``name`` and ``data-path``; raise ``DataError`` if one is missing or invalid."""
    missing = [key for key in ("name", "data-path") if not node.get(key)]
    if missing:
        raise DataError(
            f"--node-config lacks {' and '.join(missing)}; start the SuperNode with, for example, "
            '--node-config \'name="court" data-path="/data/court"\''
        )
    name, path = str(node["name"]), Path(str(node["data-path"])).expanduser()
    if not is_name(name):
        raise DataError(
            f"{name!r} can't be a client's name: use at most 64 letters, digits, ' ', '.', '_' "
            "or '-' (at most 200 bytes), with a letter, digit or '_' at both ends"
        )
    if not path.is_absolute():
        raise DataError(f'data-path = "{path}" must be an absolute path')
    return name, path
