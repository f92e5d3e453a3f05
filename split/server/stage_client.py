"""The coordinator's connection to a stage, and texts whose keys and values stages cache."""

import itertools
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from finetuning.errors import printable
from split.address import parse_address
from split.protocol.frames import Padding
from split.server.compute import Priority
from split.server.stage import (
    Tensors,
    end_stream,
    make_tls_context,
    open_tls,
    receive_tensors,
    send_tensors,
)


class StageError(RuntimeError):
    """A call to a stage has failed; ``public`` is the reason without other clients' data."""

    def __init__(self, address: str, reason: str, out_of_memory: bool) -> None:
        super().__init__(f"the stage at {address} failed: {reason}")
        self.public = str(self) if out_of_memory else f"the stage at {address} failed"


class StageClient:
    """The connection to a stage, with a thread that makes all calls to it, and its adapters.

    Backward passes overtake forward passes, which frees memory at the stage; calls with the same
    priority are made in the order in which they were queued. Raise ``ConnectionError`` if the stage
    can't be used.
    """

    def __init__(self, address: str, key: str) -> None:
        self.adapters: dict[str, dict[str, torch.nn.Parameter]] = {"": {}}
        self._sent: dict[str, int] = {}  # by adapter, version of the weights at the stage
        self._numbers = itertools.count(1)
        self._address = address
        self._order = itertools.count()
        self._closed, self._lock = False, threading.Lock()
        self._queue = queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]()
        try:
            plain = socket.create_connection(parse_address(address), timeout=30.0)
            context = make_tls_context(Path(key).expanduser(), ssl.PROTOCOL_TLS_CLIENT)
            self._stream = open_tls(plain, context, is_server=False)
        except (OSError, ValueError) as error:
            hint = "does `chambers stage` run there with split.body-key, and for no other run?"
            raise ConnectionError(
                f"the stage at {address} can't be used: {error}; {hint}"
            ) from error
        self._thread = threading.Thread(target=self._work, name=f"stage {address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection; calls that have not been answered fail."""
        with self._lock:
            self._closed = True
            self._queue.put((len(Priority), next(self._order), None))
        end_stream(self._stream)
        self._thread.join()
        self._stream.close()

    def put(self, priority: Priority, work: Callable[[], None]) -> None:
        """Queue a function that makes calls and handles their errors.

        Raise ``ConnectionError`` if the connection was closed.
        """
        with self._lock:
            if self._closed:
                raise ConnectionError(f"the connection to the stage at {self._address} was closed")
            self._queue.put((priority, next(self._order), work))

    def call(self, call: str, tensors: Tensors | None = None, **fields: Any) -> Tensors:
        """Make a call before all that are queued, and return its result; see ``ask``."""
        future: Future[Tensors] = Future()

        def work() -> None:
            try:
                future.set_result(self.ask(call, tensors, **fields))
            except Exception as error:
                future.set_exception(error)

        self.put(Priority.CLEANUP, work)
        return future.result()

    def ask(self, call: str, tensors: Tensors | None = None, **fields: Any) -> Tensors:
        """Return a call's result; raise a StageError if it failed, or a ConnectionError.

        Call this method in the stage's thread.
        """
        try:
            send_tensors(self._stream, tensors or {}, call=call, **fields)
            answer, answered = receive_tensors(self._stream)
        except OSError as error:
            end_stream(self._stream)  # the answer could still arrive, instead of the next call's
            raise ConnectionError(f"the stage at {self._address} is lost: {error}") from error
        if "error" in answered:
            raise StageError(self._address, printable(answered["error"]), answered["memory"])
        return answer

    def attach(self, name: str, adapter: dict[str, Any]) -> None:
        """Add an adapter with the given settings."""
        weights = self.call("attach", name=name, adapter=adapter)
        self.adapters[name] = {n: torch.nn.Parameter(value) for n, value in weights.items()}

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        del self.adapters[name]
        self._sent.pop(name, None)
        self.call("remove", name=name)

    def run_blocks(
        self,
        hidden: torch.Tensor,
        lengths: torch.Tensor,
        random: torch.Tensor,
        name: str,
        grad: bool,
        **fields: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute the blocks, in the stage's thread.

        If ``grad``, the stage keeps what the gradients for the adapter's weights need, and those
        for a ``hidden`` that requires one. Return the result, the next state of the random
        generator, and the number of the pass; 0 if there are no gradients to compute.
        """
        number = (
            next(self._numbers) if grad and (hidden.requires_grad or self.adapters[name]) else 0
        )
        tensors = {"hidden": hidden, "lengths": lengths, "random": random}
        tensors |= self._new_weights(name)
        fields |= {"number": number, "grad": hidden.requires_grad}
        answer = self.ask("forward", tensors, name=name, **fields)
        return answer["hidden"].requires_grad_(number > 0), answer["random"], number

    def discard(self, number: int) -> None:
        """Free the activations of a forward pass whose gradient won't come."""
        self.call("discard", number=number)

    def begin_texts(self, number: int, name: str, padding: Padding, columns: int) -> None:
        """Begin a batch of texts, whose keys and values the stage caches."""
        tensors = {"lengths": padding.lengths, **self._new_weights(name)}
        self.call("cache", tensors, number=number, name=name, side=padding.side, columns=columns)

    def _new_weights(self, name: str) -> Tensors:
        """Return an adapter's weights if the stage does not have them yet."""
        weights = self.adapters[name]
        version = sum(value._version for value in weights.values())  # grows with each change
        if self._sent.get(name) == version:
            return {}
        self._sent[name] = version
        return weights

    def propagate_back(self, name: str, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add to the gradients of the weights, in the stage's thread; return that for the input."""
        gradients = dict(self.ask("backward", {"gradient": gradient}, number=number))
        of_input = gradients.pop("hidden", None)
        for weight, own in gradients.items():
            parameter = self.adapters[name][weight]
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
        return of_input

    def _work(self) -> None:
        while (work := self._queue.get()[2]) is not None:
            work()
            del work  # free its tensors while waiting for the next one


class StagedKeyValues:
    """The `KeyValues` of the blocks at several stages."""

    _numbers = itertools.count()

    def __init__(
        self, stages: Sequence[StageClient], name: str, padding: Padding, columns: int
    ) -> None:
        self._stages, self._name, self._number = stages, name, next(self._numbers)
        with ExitStack() as on_failure:
            on_failure.callback(self.free)
            for stage in stages:
                stage.begin_texts(self._number, name, padding, columns)
            on_failure.pop_all()

    def extend(self, hidden: torch.Tensor, drop: int = 0) -> torch.Tensor:
        """Compute the blocks for the prompts or next tokens; see `KeyValues.extend`."""
        fields = {"number": self._number, "name": self._name, "drop": drop}
        for stage in self._stages:
            hidden = stage.call("extend", {"hidden": hidden}, **fields)["hidden"]
        return hidden

    def repeat(self, times: int) -> None:
        """Repeat each row; see `KeyValues.repeat`."""
        for stage in self._stages:
            stage.call("repeat", number=self._number, times=times)

    def free(self) -> None:
        """Free the keys and values at all stages."""
        for stage in self._stages:
            with suppress(ConnectionError):  # of a lost stage, nothing is left
                stage.call("free", number=self._number)
