"""Check the hosts of a Ray cluster before a run, and plan the run's actors."""

import json
import logging
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from chambers.actors import Machine, gpus_of_each, in_memory_of
from chambers.errors import CommandError
from federation.run_config import RunConfig, Scalar
from split.address import parse_address

_PACKAGES = ("ray", "flwr", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
_PROBE_SECONDS = 1800.0  # a host may have to digest a large model


def join(address: str, config: RunConfig, clients: int, app: Path) -> tuple[int, str, str]:
    """Check all hosts, and send them the app's folder in simulations that this process starts.

    Return the number of actors, the resources of each as options of Flower, and this host's address
    in the cluster. Raise ``CommandError`` if the cluster can't be used: a host has other packages,
    another base model or other data than this one, or doesn't share ``state-path``.
    """
    if not config.state_path:
        raise CommandError("--ray needs state-path=FOLDER: a folder that all hosts share")
    import ray

    logging.captureWarnings(True)  # discards Ray's warnings, since logging has no handler
    # As on a single machine, each actor has one thread, so that results are equal.
    job = {"runtime_env": {"working_dir": str(app), "env_vars": {"OMP_NUM_THREADS": "1"}}}
    try:
        socket.create_connection(parse_address(address), timeout=10).close()  # Ray retries
        ray.init(address, log_to_driver=False, logging_level="ERROR", **job)
        here = ray.util.get_node_ip_address()
        with NamedTemporaryFile(dir=config.state_path) as shared:
            hosts = _check_hosts(ray, config.flat(), shared.name)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        form = "HOST:PORT, on a host of the cluster"
        raise CommandError(f"--ray {address} ({form}): {error}") from error
    finally:
        ray.shutdown()
    # Flower has no settings for these, but Ray also reads them from the environment.
    os.environ |= {"RAY_ADDRESS": address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    # Flower starts as many actors on each host as its CPUs and GPUs allow.
    at_once, share = config.trains_at_once, gpus_of_actor(config, clients, hosts)
    cpus = max(math.ceil(host.cores / in_memory_of(config, host)) for host in hosts)
    each = (min(h.cores // cpus, h.gpus / share if share else h.cores) for h in hosts)
    # The last two are the size of Flower's thread pool on this host.
    actors = min(sum(map(int, each)), (os.cpu_count() or 1) + 4, 32)
    if actors < (clients if at_once else 1):
        raise CommandError(f"the cluster can train only {actors} of {clients} clients at once")
    return actors, f"client-resources-num-cpus={cpus} client-resources-num-gpus={share}", here


def gpus_of_actor(config: RunConfig, clients: int, hosts: Sequence[Machine]) -> float:
    """Return the number of GPUs per actor, which can't have GPUs of several hosts."""
    owned = [host.gpus for host in hosts if host.gpus]
    if not config.trains_at_once:
        actors = len(owned) if config.model.devices == "all" else sum(owned)
        return min([gpus_of_each(actors, sum(owned)), *owned])
    share = min([gpus_of_each(clients, sum(owned)), *owned])
    while share > 1 and sum(gpus // share for gpus in owned) < clients:
        share -= 1  # not all actors fit on the hosts
    return share


def _check_hosts(ray: Any, values: Mapping[str, Scalar], shared: str) -> list[Machine]:
    """Compare all hosts with this one; return their resources."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the app lacks this module
    task = ray.remote(num_cpus=0, max_retries=0)(probe)
    nodes = [node for node in ray.nodes() if node["Resources"].get("CPU")]
    replies = [
        task.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(values, shared)
        for node in nodes
    ]
    values_here, hosts = probe(values, shared)[0], []
    for node, reply in zip(nodes, replies, strict=True):
        host = node["NodeManagerAddress"]
        try:
            values_there, memory = ray.get(reply, timeout=_PROBE_SECONDS)
        except ray.exceptions.RayError as error:
            reason = getattr(error, "cause", error)
            raise ValueError(f"host {host}: {type(reason).__name__}: {reason}") from error
        for name in sorted(values_here.keys() | values_there.keys()):
            one, other = values_there.get(name, "missing"), values_here.get(name, "missing")
            if one != other:
                raise ValueError(f"{name} is {one} on host {host}, but {other} on this host")
        owned = node["Resources"]
        hosts.append(Machine(int(owned["CPU"]), memory, int(owned.get("GPU", 0))))
    return hosts


def probe(values: Mapping[str, Scalar], shared: str) -> tuple[dict[str, str], int]:
    """Return what must be equal on all hosts, and the available memory; called on each host."""
    from hashlib import file_digest
    from importlib.metadata import version
    from platform import python_version

    import psutil

    from client_app.institution import base_model_of
    from federation.run_config import parse_run_config

    config = parse_run_config(values)
    facts = {"Python": python_version()} | {name: version(name) for name in _PACKAGES}
    facts |= {f"the model's {name}": value for name, value in base_model_of(config)[1].items()}
    path = Path(config.data.path).expanduser()
    for file in (path, *sorted(path.rglob("*"))) if path.is_absolute() else ():
        if file.is_file():
            with file.open("rb") as content:
                facts[f"the digest of {file}"] = file_digest(content, "sha256").hexdigest()
    is_shared = "shared" if Path(shared).exists() else "not shared"
    return facts | {f"state-path ({Path(shared).parent})": is_shared}, (
        psutil.virtual_memory().available
    )
