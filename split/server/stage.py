"""A stage: consecutive blocks of the body, on another host of the coordinator's site.

The coordinator (`split.server.body`) sends calls over TLS. Both ends have the same private
key and self-signed certificate, and trust no others.
"""

import gc
import json
import logging
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load, save

from finetuning.adapters.adapter import load_state
from finetuning.devices import is_broken, to_device
from finetuning.errors import BaseModelError
from finetuning.model.fingerprint import combine_digests, digest_config
from finetuning.randomness import derive_seed, set_seed
from finetuning.settings import AdapterSettings, ModelSettings
from split import framing
from split.address import parse_address
from split.lane.half_open import RefusedHandshakes, SilentStreams, network_of
from split.model.devices import body_devices
from split.model.key_values import KeyValues
from split.model.loading import load_parts, locate_parts
from split.model.part import Part
from split.model.partition import partition_of
from split.protocol.frames import Padding
from split.server.session import describe_lane_error
from split.settings import SplitSettings

Tensors = Mapping[str, torch.Tensor]
# Limits on connections whose other end hasn't shown yet that it has the key.
_MAX_HANDSHAKES = 64
_HANDSHAKE_SECONDS = 10.0
_CONNECT_SECONDS = 30.0  # a coordinator's limit for a handshake, and for the end of another run
_CALL_SECONDS = 3600.0  # a coordinator's limit for a call; loading takes longest
_TURN = b"\n"  # tells a coordinator that the stage now serves it
_log = logging.getLogger(__name__)


def make_tls_context(key: Path, kind: int) -> ssl.SSLContext:
    """Return the settings of an end; raise an OSError if the file has no key and certificate."""
    context = ssl.SSLContext(kind)
    context.check_hostname = False  # any host with the key
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.read_text(errors="replace"))
    context.load_cert_chain(key)
    return context


def open_tls(
    plain: socket.socket,
    context: ssl.SSLContext,
    is_server: bool,
    limit: Callable[[Callable[[], object]], AbstractContextManager[object]] = nullcontext,
) -> ssl.SSLSocket:
    """Return a connection with TLS; raise an OSError if the other end has another key.

    A coordinator also waits until the stage serves it. During the handshake, ``limit`` is entered
    with a function that ends the connection.
    """
    with ExitStack() as on_failure:
        on_failure.enter_context(plain)
        plain.settimeout(_CONNECT_SECONDS)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            plain.setsockopt(socket.IPPROTO_TCP, option, 10)  # also notice soon a host that is lost
        # The kernel doesn't probe the other host while sent data are not acknowledged.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100_000)  # milliseconds
        stream = on_failure.enter_context(
            context.wrap_socket(plain, server_side=is_server, do_handshake_on_connect=False)
        )
        with limit(partial(end_stream, stream)):
            stream.do_handshake()
        if not is_server and stream.recv(1) != _TURN:
            raise ConnectionError("the other end has closed the connection")
        # A coordinator may make no calls for as long as its clients compute.
        stream.settimeout(None if is_server else _CALL_SECONDS)
        on_failure.pop_all()
        return stream


def end_stream(stream: ssl.SSLSocket) -> None:
    """End a connection that another thread may be using."""
    with suppress(OSError):  # the connection has already ended
        # SSLSocket's own method would let the thread that uses the stream continue without TLS.
        socket.socket.shutdown(stream, socket.SHUT_RDWR)


def send_tensors(stream: ssl.SSLSocket, tensors: Tensors, **fields: Any) -> None:
    """Send a message: a line of JSON, and tensors in safetensors format."""
    copies = {name: t.detach().contiguous() for name, t in tensors.items()}
    framing.send(stream, json.dumps(fields).encode() + b"\n" + save(copies))


def receive_tensors(stream: ssl.SSLSocket) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a message's tensors and fields; raise an OSError if the connection has ended."""
    message = framing.receive(stream)
    end = message.index(b"\n")
    tensors = load(bytes(memoryview(message)[end + 1 :]))
    # Copy the tensors, because the rounding of matrix products depends on the memory alignment.
    return {name: t.clone() for name, t in tensors.items()}, json.loads(message[:end])


def serve_stage(listen: str, key: Path) -> NoReturn:
    """Serve one run after another.

    Raise ``ValueError`` if ``listen`` isn't an address and a port, or ``OSError`` if the address or
    the key can't be used.
    """
    address, context = parse_address(listen), make_tls_context(key, ssl.PROTOCOL_TLS_SERVER)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    admitted = queue.SimpleQueue[tuple[str, ssl.SSLSocket]]()
    with socket.create_server(address, family=family) as listener:
        _log.info("waiting for a coordinator at %s:%d", *listener.getsockname()[:2])
        threading.Thread(target=_admit, args=(listener, context, admitted), daemon=True).start()
        while True:
            peer, stream = admitted.get()
            try:
                with stream:
                    stream.sendall(_TURN)
                    _Blocks().serve(stream)
            except OSError as error:
                _log.info("the connection of %s has ended: %s", peer, error)
            gc.collect()  # a model's hooks form reference cycles


def _admit(
    listener: socket.socket,
    context: ssl.SSLContext,
    admitted: "queue.SimpleQueue[tuple[str, ssl.SSLSocket]]",
) -> NoReturn:
    """Accept connections, and queue those whose other end has the key.

    Anyone who can reach the port can connect, so each handshake has its own thread, and their
    number and duration are limited.
    """
    handshakes, refused = SilentStreams(_MAX_HANDSHAKES, _HANDSHAKE_SECONDS), RefusedHandshakes()

    def shake_hands(plain: socket.socket, peer: str) -> None:
        limit = partial(handshakes.count, network_of(peer))
        try:
            admitted.put((peer, open_tls(plain, context, is_server=True, limit=limit)))
        except OSError as error:
            refused.note(f"{peer}: {error}")

    while True:
        try:
            plain, (peer, *_) = listener.accept()
        except OSError as error:  # the connection has already ended
            refused.note(error)
            continue
        threading.Thread(target=shake_hands, args=(plain, peer), daemon=True).start()


class _Blocks:
    """A run's blocks, and the calls that they answer."""

    def __init__(self) -> None:
        self._part: Part
        # By number of the forward pass: name of the adapter, input and output.
        self._passes: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._texts: dict[int, KeyValues] = {}  # by number of the batch of texts
        # By name of the call, the method that takes and returns tensors by name.
        self._answers: dict[str, Callable[..., Tensors]] = {
            "load": self._load,
            "attach": self._attach,
            "remove": self._remove,
            "forget": self._forget,
            "discard": self._discard,
            "forward": self._run_blocks,
            "backward": self._propagate_back,
            "cache": self._cache,
            "extend": self._extend,
            "repeat": self._repeat,
            "free": self._free,
        }

    def serve(self, stream: ssl.SSLSocket) -> NoReturn:
        """Answer calls; the field ``error`` of an answer describes why the call failed."""
        while True:
            tensors, fields = receive_tensors(stream)
            problem = {}
            try:
                answer = self._answers[fields.pop("call")](tensors, **fields)
            except Exception as error:
                _log.exception("a call failed")
                memory = isinstance(error, torch.OutOfMemoryError)
                answer, problem = {}, {"error": describe_lane_error(error), "memory": memory}
            send_tensors(stream, answer, **problem)
            if problem and is_broken():
                raise SystemExit("a kernel has failed on the GPU: start this process again")

    def _load(self, _: Tensors, model: Any, split: Any, expected: str) -> Tensors:
        """Load the blocks: the body of the partition in the settings ``split``."""
        settings, stage = ModelSettings.model_validate(model), SplitSettings.model_validate(split)
        directory = locate_parts(settings.name, stage, ("body",))
        partition, devices = partition_of(directory, stage), body_devices(stage)
        self._part = load_parts(settings, directory, partition, ("body",), devices)["body"]
        config = {"config.json": digest_config(directory / "config.json")}
        if combine_digests(self._part.digests | config) != expected:
            raise BaseModelError(f"the checkpoint in {directory} differs from the coordinator's")
        return {"dtype": torch.empty(0, dtype=self._part.dtype)}

    def _attach(self, _: Tensors, name: str, adapter: Any) -> Tensors:
        self._part.attach(AdapterSettings.model_validate(adapter), name)
        return self._part.trainable(name)

    def _remove(self, _: Tensors, name: str) -> Tensors:
        self._part.remove(name)
        return {}

    def _forget(self, _: Tensors, name: str) -> Tensors:
        self._passes = {n: kept for n, kept in self._passes.items() if kept[0] != name}
        return {}

    def _discard(self, _: Tensors, number: int) -> Tensors:
        self._passes.pop(number, None)
        return {}

    def _run_blocks(
        self, tensors: Any, name: str, side: Any, number: int, grad: bool, train: bool
    ) -> Tensors:
        """Compute the blocks. Tensors that this method does not name are new weights."""
        hidden, lengths, random = (tensors.pop(key) for key in ("hidden", "lengths", "random"))
        self._use(name, tensors)
        self._part.train(train)
        if torch.accelerator.is_available():
            set_seed(derive_seed(self._part.partition.head, random.numpy().tobytes().hex()))
        torch.set_rng_state(random)  # on CPUs, dropout is that of a single process
        hidden.requires_grad_(grad)
        with torch.set_grad_enabled(number > 0):
            output = self._part(hidden, Padding(side, lengths))
        if number:
            self._passes[number] = name, hidden, output
        return {"hidden": output, "random": torch.get_rng_state()}

    def _use(self, name: str, weights: Tensors) -> None:
        """Select an adapter, with new weights if there are any."""
        if weights:
            load_state(self._part.trainable(name), weights)
            self._forget({}, name)  # no gradients will come for passes with the old weights
        self._part.use(name or None)

    def _cache(self, tensors: Any, number: int, name: str, side: Any, columns: int) -> Tensors:
        """Begin a batch of texts. Tensors that this method does not name are new weights."""
        padding = Padding(side, tensors.pop("lengths"))
        self._use(name, tensors)
        self._texts[number] = KeyValues(self._part, padding, columns)
        return {}

    @torch.no_grad()
    def _extend(self, tensors: Tensors, number: int, name: str, drop: int) -> Tensors:
        """Compute the blocks for a batch's prompts or next tokens."""
        self._use(name, {})
        self._part.train(False)
        return {"hidden": self._texts[number].extend(tensors["hidden"], drop)}

    def _repeat(self, _: Tensors, number: int, times: int) -> Tensors:
        self._texts[number].repeat(times)
        return {}

    def _free(self, _: Tensors, number: int) -> Tensors:
        self._texts.pop(number, None)  # a batch that another stage couldn't begin
        return {}

    def _propagate_back(self, tensors: Tensors, number: int) -> Tensors:
        """Return the gradients for the input and for the adapter's weights."""
        name, hidden, output = self._passes.pop(number)
        self._part.use(name)
        self._part.train(True)
        inputs = self._part.trainable(name) | ({"hidden": hidden} if hidden.requires_grad else {})
        gradient = to_device(tensors["gradient"], output.device, output.dtype)
        results = torch.autograd.grad(output, [*inputs.values()], gradient, allow_unused=True)
        return {name: g for name, g in zip(inputs, results, strict=True) if g is not None}
