"""The body of a model: in this process, or in stages on several hosts of the coordinator's site.

The weights of the adapters, their gradients and optimizers are always in this process.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetuning.errors import BaseModelError
from finetuning.model.base_model import outline
from finetuning.model.fingerprint import combine_digests, fingerprint
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.devices import body_devices
from split.model.loading import load_parts, tensors_of
from split.model.part import Activations
from split.model.partition import Partition, partition_of
from split.protocol.frames import Padding
from split.server.compute import Priority
from split.server.interfaces import Body
from split.server.stage_client import StageClient, StagedKeyValues
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


@dataclass
class _ForwardPass:
    """A forward pass through the stages.

    Its parts are methods, because functions that refer to themselves would keep the tensors in
    memory until the next search for cycles of references.
    """

    hidden: torch.Tensor  # input of the first stage
    fields: dict[str, Any]  # arguments of `StageClient.run_blocks`
    done: Future[Activations]
    numbers: list[int] = field(default_factory=list)  # of the pass at each stage so far


class StagedBody:
    """The `Body` on several hosts, each of which computes another pass at the same time.

    Raise ``ConnectionError`` if a stage can't be used, or ``RuntimeError`` if it can't load the
    same checkpoint.
    """

    def __init__(self, directory: Path, model: ModelSettings, split: SplitSettings) -> None:
        self.hidden_size = int(outline(directory).config.hidden_size)
        self.device = torch.device("cpu")
        self._training, self._used = False, ""
        # By adapter: passes that are not complete, and the error of one that failed.
        self._changed = threading.Condition()
        self._open: Counter[str] = Counter()
        self._errors: dict[str, BaseException] = {}
        self.stages: list[StageClient] = []
        digests = fingerprint(directory)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            for host, own in divide_body(partition_of(directory, split), split).items():
                self.stages.append(StageClient(host, split.body_key))
                names = [*tensors_of(directory, own, ("body",)), "config.json"]
                expected = combine_digests({name: digests[name] for name in names})
                stage = split.model_copy(update={"head_blocks": own.head, "tail_blocks": own.tail})
                settings = {"model": model.model_dump(), "split": stage.model_dump()}
                answer = self.stages[-1].call("load", expected=expected, **settings)
                self.dtype = answer["dtype"].dtype
            on_failure.pop_all()

    def close(self) -> None:
        """Free the blocks at all stages."""
        for stage in self.stages:
            stage.close()

    def attach(self, settings: AdapterSettings, name: str) -> None:
        """Add an adapter; see `Part.attach`."""
        for stage in self.stages:
            stage.attach(name, settings.model_dump())

    def trainable(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return an adapter's weights; see `Part.trainable`."""
        return dict(sorted(pair for each in self.stages for pair in each.adapters[name].items()))

    def remove(self, name: str) -> None:
        """Remove an adapter, after its passes."""
        self._wait(name)
        del self._open[name]
        self._errors.pop(name, None)
        for stage in self.stages:
            stage.remove(name)

    def forget(self, name: str) -> None:
        """Free the activations of an adapter's forward passes whose gradients won't come."""
        self._wait(name)
        self._errors.pop(name, None)
        for stage in self.stages:
            with suppress(ConnectionError):  # of a lost stage, nothing is left
                stage.call("forget", name=name)

    def settle(self, name: str) -> None:
        """Wait for an adapter's passes; raise the error of one that failed since ``forget``."""
        self._wait(name)
        if name in self._errors:
            raise self._errors[name]

    def use(self, name: str | None) -> None:
        """Select the adapter to compute with; None selects the base model without an adapter."""
        self._used = name or ""

    def with_cache(self) -> Callable[[Padding, int], StagedKeyValues]:
        """Return what begins a batch of texts with the adapter in use."""
        return partial(StagedKeyValues, self.stages, self._used)

    def train(self, mode: bool) -> None:
        """Turn dropout on or off."""
        self._training = mode

    def start(self, hidden: torch.Tensor, padding: Padding) -> Future[Activations]:
        """Begin a forward pass; see `Body.start`."""
        fields = {"name": self._used, "grad": torch.is_grad_enabled()}
        fields |= {"lengths": padding.lengths, "side": padding.side, "train": self._training}
        done = self._begin(self._used)
        begun = _ForwardPass(hidden, fields, done)
        self._put_forward(begun, 0, hidden, torch.get_rng_state())
        return done

    def _put_forward(
        self, begun: "_ForwardPass", at: int, states: torch.Tensor, random: torch.Tensor
    ) -> None:
        run = partial(self._run_blocks, begun, at, states, random)
        self._put(Priority.FORWARD, at, begun.done, run)

    def _run_blocks(
        self, begun: "_ForwardPass", at: int, states: torch.Tensor, random: torch.Tensor
    ) -> None:
        """Compute a stage's blocks, in its thread; then queue the pass at the next stage."""
        stage = self.stages[at]
        states, random, number = stage.run_blocks(states, random=random, **begun.fields)
        begun.numbers.append(number)
        if stage is self.stages[-1]:
            begun.done.set_result(Activations(begun.hidden, states, tuple(begun.numbers)))
        else:
            self._put_forward(begun, at + 1, states, random)

    def propagate_back(
        self, activations: Activations, gradient: torch.Tensor
    ) -> Future[torch.Tensor | None]:
        """Begin a backward pass; see `Body.propagate_back`."""
        done = self._begin(self._used)
        if activations.output.requires_grad:
            self._put_backward(self._used, activations.passes, gradient, done)
        else:
            done.set_result(None)
        return done

    def _put_backward(
        self, name: str, numbers: tuple[int, ...], gradient: torch.Tensor, done: Future[Any]
    ) -> None:
        run = partial(self._propagate, name, numbers, gradient, done)
        self._put(Priority.BACKWARD, len(numbers) - 1, done, run)

    def _propagate(
        self, name: str, numbers: tuple[int, ...], gradient: torch.Tensor, done: Future[Any]
    ) -> None:
        """Propagate back through the last of these stages' passes; then queue those before it."""
        *before, number = numbers
        of_input = self.stages[len(before)].propagate_back(name, number, gradient)
        if before and of_input is not None:
            self._put_backward(name, tuple(before), of_input, done)
        else:
            done.set_result(of_input)

    def discard(self, activations: Activations) -> None:
        """Free the activations of a forward pass whose gradient won't come."""
        for stage, number in zip(self.stages, activations.passes, strict=True):
            with suppress(ConnectionError):  # of a lost stage, nothing is left
                stage.discard(number)

    def _begin(self, name: str) -> Future[Any]:
        """Return the future of a new pass with an adapter."""

        def note_end(done: Future[Any]) -> None:
            with self._changed:
                self._open[name] -= 1
                if (error := done.exception()) is not None:
                    self._errors.setdefault(name, error)
                self._changed.notify_all()

        with self._changed:
            self._open[name] += 1
        done: Future[Any] = Future()
        done.add_done_callback(note_end)
        return done

    def _put(
        self, priority: Priority, at: int, done: Future[Any], work: Callable[[], None]
    ) -> None:
        """Queue a part of a pass at a stage; the pass fails if the part does."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)

        try:
            self.stages[at].put(priority, run)
        except ConnectionError as error:
            done.set_exception(error)

    def _wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._open[name])
