"""The services of a Compose file, as the programs that a container engine would start."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.hosts import View

# Here and with systemd, a host's programs share one network; containers reach each other by name.
_CONTAINER = re.compile(r"\b(superlink|supernode|proxy)(?=:\d)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@dataclass(frozen=True)
class Service:
    """A service of a Compose file.

    Attributes:
        name: Name of the service.
        command: Program and arguments.
        health: Command that succeeds once the service is ready.
        view: The service's files and environment.

    """

    name: str
    command: list[str]
    health: list[str]
    view: View


def read_services(file: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Read a Compose file.

    Args:
        file: The Compose file.
        variables: Values for ``${NAME}``; other variables have their defaults.

    Raises:
        KeyError: A variable without a default has no value.

    """
    content = _interpolate(yaml.safe_load(file.read_text()), variables)
    secrets = {name: Path(value["file"]) for name, value in content.get("secrets", {}).items()}
    return {
        name: Service(
            name=name,
            command=_command(values),
            # The first word is CMD, which means that no shell is used.
            health=list(map(_loopback, values["healthcheck"]["test"][1:])),
            view=_view(values, secrets, file.parent),
        )
        for name, values in content["services"].items()
    }


def _command(values: Mapping[str, Any]) -> list[str]:
    command = [*values["entrypoint"], *values["command"]]
    if command[0] == "sh":  # changes the addresses in nginx.conf, and starts nginx
        command = shlex.split(command[-1].rpartition("exec ")[2].replace("containers", "nginx"))
    return list(map(_loopback, command))


def _loopback(text: str) -> str:
    return _CONTAINER.sub("127.0.0.1", text.replace("--host=0.0.0.0", "--host=127.0.0.1"))


def _view(values: Mapping[str, Any], secrets: Mapping[str, Path], folder: Path) -> View:
    mounts = {secret["target"]: secrets[secret["source"]] for secret in values.get("secrets", [])}
    read_only = set(mounts)
    for volume in values.get("volumes", []):
        mounts[volume["target"]] = folder / volume["source"]
        if volume.get("read_only"):
            read_only.add(volume["target"])
    environment = {}
    if "env_file" in values:
        for line in (folder / values["env_file"]).read_text().splitlines():
            if line and not line.startswith("#"):
                key, _, value = line.partition("=")
                environment[key] = value
    for key, value in values.get("environment", {}).items():
        environment[key] = _loopback(value)
    return View(mounts, read_only, environment)


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if name in variables:
            return variables[name]
        if kind == "-":
            return str(text)
        raise KeyError(f"{name} {text or 'has no value'}")

    return _VARIABLE.sub(replace, value)
