"""The body of a model: in this process, or in stages on several hosts of the coordinator's site.

The weights of the adapters, their gradients and optimizers are always in this process.
"""

import itertools
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from finetuning.errors import BaseModelError, printable
from finetuning.model.base_model import outline
from finetuning.model.fingerprint import combine_digests, fingerprint
from finetuning.settings import AdapterSettings, ModelSettings
from split.address import parse_address
from split.model.devices import body_devices
from split.model.loading import load_parts, tensors_of
from split.model.part import Part
from split.model.partition import Partition, partition_of
from split.protocol.frames import Padding
from split.server.interfaces import Body
from split.server.stage import (
    Tensors,
    make_tls_context,
    open_tls,
    receive_tensors,
    send_tensors,
)
from split.settings import SplitSettings


def load_body(directory: Path, model: ModelSettings, split: SplitSettings) -> Body:
    """Load the body of the checkpoint in a directory.

    Raise ``BaseModelError`` if it can't be loaded. See `StagedBody` for ``split.body-hosts``.
    """
    if split.body_hosts:
        return StagedBody(directory, model, split)
    partition, devices = partition_of(directory, split), body_devices(split)
    return load_parts(model, directory, partition, ("body",), devices)["body"]


def divide_body(partition: Partition, split: SplitSettings) -> dict[str, Partition]:
    """Divide the body evenly among the hosts; a host's blocks are the body of its partition.

    Raise a BaseModelError if a host is named twice, or there are fewer blocks than hosts.
    """
    hosts = [host.strip() for host in split.body_hosts.split(",")]
    body, count = partition.range_of("body"), len(hosts)
    if count > len(body) or len({*hosts}) < count:
        raise BaseModelError(f"split.body-hosts must be different hosts, at most {len(body)}")
    ends = [body.start + len(body) * number // count for number in range(count + 1)]
    pairs = zip(hosts, itertools.pairwise(ends), strict=True)
    return {h: Partition(partition.blocks, a, partition.blocks - b) for h, (a, b) in pairs}


class _StageClient:
    """The connection to a stage, and the adapters on the stage's blocks."""

    def __init__(self, address: str, key: str) -> None:
        self.adapters: dict[str, dict[str, torch.nn.Parameter]] = {"": {}}
        self.sent: dict[str, int] = {}  # by adapter, version of the weights at the stage
        self._numbers = itertools.count(1)
        self._address = address
        try:
            plain = socket.create_connection(parse_address(address), timeout=30.0)
            context = make_tls_context(Path(key).expanduser(), ssl.PROTOCOL_TLS_CLIENT)
            self.stream = open_tls(plain, context, is_server=False)
        except (OSError, ValueError) as error:
            hint = "does `chambers stage` run there with split.body-key, and for no other run?"
            raise ConnectionError(
                f"the stage at {address} can't be used: {error}; {hint}"
            ) from error

    def call(self, call: str, tensors: Tensors | None = None, **fields: Any) -> Tensors:
        """Return a call's result; raise a RuntimeError if it failed, or a ConnectionError."""
        try:
            send_tensors(self.stream, tensors or {}, call=call, **fields)
            answer, answered = receive_tensors(self.stream)
        except OSError as error:
            raise ConnectionError(f"the stage at {self._address} is lost: {error}") from error
        if "error" in answered:
            reason = printable(answered["error"])
            raise RuntimeError(f"the stage at {self._address} failed: {reason}")
        return answer

    def run_blocks(
        self, hidden: torch.Tensor, padding: Padding, name: str, train: bool, random: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the blocks; return the result, and the next state of the random generator."""
        weights = self.adapters[name]
        needed = torch.is_grad_enabled() and (hidden.requires_grad or bool(weights))
        number = next(self._numbers) if needed else 0
        tensors = {"hidden": hidden, "lengths": padding.lengths, "random": random}
        version = sum(value._version for value in weights.values())  # grows with each change
        if self.sent.get(name) != version:
            tensors |= weights
        fields = {"number": number, "grad": hidden.requires_grad, "train": train}
        answer = self.call("forward", tensors, name=name, side=padding.side, **fields)
        self.sent[name] = version
        output = answer["hidden"], self, number, [*weights]
        return _Graph.apply(*output, hidden, *weights.values()), answer["random"]  # type: ignore[no-untyped-call]


class _Graph(torch.autograd.Function):
    """Node of the autograd graph that requests the gradients for a stage's input and weights."""

    @staticmethod
    def forward(
        context: Any,
        output: torch.Tensor,
        stage: _StageClient,
        number: int,
        names: list[str],
        *_: Any,
    ) -> torch.Tensor:
        context.stage, context.number, context.names = stage, number, names
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gradients = context.stage.call("backward", {"gradient": gradient}, number=context.number)
        names = ["hidden", *context.names]
        return None, None, None, None, *(gradients.get(name) for name in names)


class StagedBody:
    """The `Body` on several hosts.

    Raise ``ConnectionError`` if a stage can't be used, or ``RuntimeError`` if it can't load the
    same checkpoint.
    """

    def __init__(self, directory: Path, model: ModelSettings, split: SplitSettings) -> None:
        self.hidden_size = int(outline(directory).config.hidden_size)
        self.device = torch.device("cpu")
        self._training, self._used = False, ""
        self.stages: list[_StageClient] = []
        digests = fingerprint(directory)
        for host, own in divide_body(partition_of(directory, split), split).items():
            self.stages.append(_StageClient(host, split.body_key))
            names = [*tensors_of(directory, own, ("body",)), "config.json"]
            expected = combine_digests({name: digests[name] for name in names})
            stage = split.model_copy(update={"head_blocks": own.head, "tail_blocks": own.tail})
            settings = {"model": model.model_dump(), "split": stage.model_dump()}
            answer = self.stages[-1].call("load", expected=expected, **settings)
            self.dtype = answer["dtype"].dtype

    def close(self) -> None:
        """Free the blocks at all stages."""
        for stage in self.stages:
            with suppress(OSError):
                stage.stream.close()

    def attach(self, settings: AdapterSettings, name: str) -> None:
        """Add an adapter; see `Part.attach`."""
        for stage in self.stages:
            weights = stage.call("attach", name=name, adapter=settings.model_dump())
            stage.adapters[name] = {n: torch.nn.Parameter(value) for n, value in weights.items()}

    def trainable(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return an adapter's weights; see `Part.trainable`."""
        return dict(sorted(pair for each in self.stages for pair in each.adapters[name].items()))

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        for stage in self.stages:
            del stage.adapters[name]
            stage.sent.pop(name, None)
            stage.call("remove", name=name)

    def forget(self, name: str) -> None:
        """Free the activations of an adapter's forward passes whose gradients won't come."""
        for stage in self.stages:
            with suppress(ConnectionError):  # of a lost stage, nothing is left
                stage.call("forget", name=name)

    def use(self, name: str | None) -> None:
        """Select the adapter to compute with; None selects the base model without an adapter."""
        self._used = name or ""

    def with_cache(self) -> Part:
        """Raise a RuntimeError, because stages don't cache keys and values."""
        raise RuntimeError("text generation does not work with split.body-hosts")

    def train(self, mode: bool) -> None:
        """Turn dropout on or off."""
        self._training = mode

    def __call__(self, hidden: torch.Tensor, padding: Padding) -> torch.Tensor:
        """Compute all blocks; see `Part.__call__`."""
        random = torch.get_rng_state()
        for stage in self.stages:
            hidden, random = stage.run_blocks(hidden, padding, self._used, self._training, random)
        return hidden
