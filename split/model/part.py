"""A party's part of the model: its frozen blocks and the adapters on them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from finetuning.adapters.adapter import attach_adapter, target_names
from finetuning.adapters.prefixes import BlockPrefixes
from finetuning.devices import mixed_precision, to_device
from finetuning.errors import BaseModelError
from finetuning.model.backbone_inputs import left_padding, without_cache
from finetuning.model.output_head import output_head
from finetuning.randomness import generator_lock
from finetuning.settings import AdapterSettings
from split.model.partition import Partition, PartyName, blocks_of
from split.protocol.frames import Padding

Result = TypeVar("Result")


@dataclass(frozen=True)
class Activations:
    """A micro-batch between its forward pass and its backward pass."""

    hidden: torch.Tensor  # (rows, columns, hidden) from the client; a leaf on the first device
    output: torch.Tensor  # of the last block; in one process, its graph references all activations
    passes: tuple[int, ...] = ()  # number of the forward pass at each stage; see `StagedBody`


class Part:
    """One party's blocks, with any number of named adapters on the same frozen weights.

    The blocks may be spread over several devices. Adapter weights are on the device of their block.
    The frozen blocks compute in ``dtype``. ``digests`` contains the SHA-256 of each tensor that the
    model was loaded from, keyed by its name in the checkpoint; see
    `split.model.loading.load_parts`.
    """

    def __init__(
        self,
        model: Any,
        party: PartyName,
        partition: Partition,
        digests: Mapping[str, str],
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.party = party
        self.partition = partition
        self.digests = dict(digests)
        self.dtype = dtype
        # Device of the first block, for inputs. Outputs are on the device of the last block.
        self.device = _device_of(model)
        self.hidden_size = int(model.config.hidden_size)
        self._backbone = model.base_model
        # Paths of placeholders for other parties' modules, which get no adapters.
        self._placeholders = [p for p, m in model.named_modules() if isinstance(m, nn.Identity)]
        self._peft_model: Any = None
        # PEFT's name of each adapter, because PEFT allows no dots in names.
        self._slots: dict[str, str] = {}
        self._attached = 0
        self._layers: list[Any] = []
        self._prefixes: dict[str | None, BlockPrefixes] = {}
        self._used: str | None = None
        # Cache of `using_together`: each row's adapter, and each layer's stacked factors.
        self._together: tuple[Sequence[str | None], Sequence[tuple[Any, Any]]] | None = None

    def __call__(self, tokens_or_states: torch.Tensor, padding: Padding) -> torch.Tensor:
        """Compute this party's blocks with the adapter in use.

        The argument of the head contains tokens, (rows, columns) int64; that of other parties,
        hidden states, (rows, columns, hidden), to which gradients propagate back. Return the states
        after the party's last block; for the tail, also after the final norm.
        """
        inputs = self.inputs_of(tokens_or_states) | without_cache(self._backbone)
        rows, columns = tokens_or_states.shape[:2]
        if padding.side == "left" and bool((padding.lengths < columns).any()):
            lengths = to_device(padding.lengths, self.device)
            inputs |= left_padding(self._backbone, lengths, columns)
        if self.prefixes is not None:
            inputs = self.prefixes.before(inputs, rows, self.dtype, self.model.training)
        with self.autocast():
            output = self._backbone(**inputs)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def inputs_of(self, tokens_or_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tokens or hidden states as the backbone's argument, on the part's first device."""
        if self.party == "head":
            return {"input_ids": to_device(tokens_or_states, self.device)}
        return {"inputs_embeds": to_device(tokens_or_states, self.device, self.dtype)}

    def start(self, hidden: torch.Tensor, padding: Padding) -> Future[Activations]:
        """Compute the blocks; the result is complete, so that errors are raised here."""
        return _completed(Activations(hidden, self(hidden, padding)))

    def propagate_back(
        self, activations: Activations, gradient: torch.Tensor
    ) -> Future[torch.Tensor | None]:
        """Add to the gradients of the adapter in use, and return that for the input if wanted."""
        if activations.output.requires_grad:
            propagate(activations.output, gradient)
        return _completed(activations.hidden.grad)

    @property
    def prefixes(self) -> BlockPrefixes | None:
        """The adapter in use if it is a prefix (empty in a part without blocks), else None."""
        return self._prefixes.get(self._used)

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before the tokens of each row."""
        return 0 if self.prefixes is None else self.prefixes.length

    @property
    def output_head(self) -> Any:
        """The module that computes logits from the tail's hidden states; see `output_head`."""
        return output_head(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager for mixed precision on a GPU, as in the whole model.

        ``__call__`` enters it. Callers that compute logits or the loss must enter it, too.
        """
        return mixed_precision(self.device, self.dtype)

    def attach(self, settings: AdapterSettings, name: str = "default") -> None:
        """Add an adapter and use it. The adapter is empty if this part has no module to adapt.

        Raise ``BaseModelError`` if a target cannot be adapted, or prefixes are not supported. Raise
        ``ValueError`` if an adapter with this name already exists.
        """
        if name in self._slots:
            raise ValueError(f"an adapter {name!r} already exists")
        slot = f"adapter{self._attached}"
        self._attached += 1
        if settings.kind == "prefix":
            self._prefixes[name] = self._make_prefixes(settings)
        else:
            self._add_layers(settings, slot)
        self._slots[name] = slot
        self._select(name)

    def use(self, name: str | None) -> None:
        """Select the adapter to compute with; None selects the base model without an adapter.

        With gradient checkpointing, a backward pass recomputes the blocks, so the adapter of the
        forward pass must be selected again before the backward pass.
        """
        if name != self._used:
            self._select(name)

    @contextmanager
    def using_together(self, names: Sequence[str | None], rows: Sequence[int]) -> Iterator[None]:
        """Compute with a different adapter for each group of rows, without gradients.

        ``rows`` contains the number of rows of each group. The name None stands for the base model.
        Prefixes must already be in the groups' caches.
        """
        layers = [layer for layer in self._layers if layer.lora_A]  # skip layers without adapters
        of_rows = [name for name, count in zip(names, rows, strict=True) for _ in range(count)]
        if self._together is None or self._together[0] != of_rows:
            self._together = of_rows, [self._factors(layer, of_rows) for layer in layers]
        self._select(None)
        with ExitStack() as hooks:
            for layer, (first, second) in zip(layers, self._together[1], strict=True):

                def add(_: Any, inputs: Any, output: Any, a: Any = first, b: Any = second) -> Any:
                    return output + (inputs[0].to(a.dtype) @ a @ b).to(output.dtype)

                hooks.callback(layer.register_forward_hook(add).remove)
            yield

    def _factors(self, layer: Any, names: Sequence[str | None]) -> tuple[Any, Any]:
        """Return each row's LoRA factors, (rows, in, rank) and (rows, rank, out), scaled."""
        any_slot = next(iter(layer.lora_A))
        no_first, no_second = (
            torch.zeros_like(m[any_slot].weight.mT) for m in (layer.lora_A, layer.lora_B)
        )
        firsts, seconds = [], []
        for name in names:
            slot = self._slots.get(name or "")
            if slot in layer.lora_A:
                first, second = (m[slot].weight.detach().mT for m in (layer.lora_A, layer.lora_B))
                firsts.append(first * layer.scaling[slot])
                seconds.append(second)
            else:
                firsts.append(no_first)
                seconds.append(no_second)
        return torch.stack(firsts), torch.stack(seconds)

    def trainable(self, name: str = "default") -> dict[str, torch.nn.Parameter]:
        """Return an adapter's weights, sorted and keyed by name in the whole model's saved adapter.

        The result is empty if this party has nothing to train.
        """
        slot = self._slots[name]
        if name in self._prefixes:
            return self._prefixes[name].parameters
        if self._peft_model is None:
            return {}
        return {
            ".".join(part for part in path.split(".") if part != slot): parameter
            for path, parameter in sorted(self._peft_model.named_parameters())
            if slot in path.split(".")
        }

    def remove(self, name: str) -> None:
        """Remove an adapter and free its memory; if it was in use, switch to the base model."""
        is_prefix = self._prefixes.pop(name, None) is not None
        has_weights = not is_prefix and bool(self.trainable(name))
        used = self._used
        if has_weights:
            # Select another adapter first. Otherwise, PEFT selects one with a warning, and fails
            # later if the base model is in use.
            self._select(next((other for other in self._slots if other != name), name))
        slot = self._slots.pop(name)
        if has_weights:
            self._peft_model.delete_adapter(slot)
            self._find_adapted_layers()
        self._select(None if used == name else used)

    def train(self, mode: bool) -> None:
        """Turn dropout on or off, and gradient checkpointing too if the settings enable it."""
        if self.model.training != mode:
            self.model.train(mode)

    def discard(self, activations: Activations) -> None:
        """Do nothing, because activations are freed with the tensors that refer to them."""

    def settle(self, name: str) -> None:
        """Do nothing, because all passes are complete."""

    def forget(self, name: str) -> None:
        """Do nothing, because activations are freed with the tensors that refer to them."""

    def with_cache(self) -> "Part":
        """Return the part itself, because its keys and values can be cached."""
        return self

    def close(self) -> None:
        """Do nothing, because the blocks are in this process."""

    def _add_layers(self, settings: AdapterSettings, slot: str) -> None:
        model = self._peft_model or self.model
        try:
            self._peft_model = attach_adapter(
                model=model, settings=settings, base=None, name=slot, excluded=self._placeholders
            )
        except BaseModelError:
            # Creating the whole model's adapter has already rejected targets that match nothing.
            paths = {path for path, _ in self.model.named_modules()} - set(self._placeholders)
            names = target_names(settings)
            if any(f".{path}".endswith(f".{name}") for path in paths for name in names):
                raise
        self._find_adapted_layers()
        self.model.train(self.model.training)

    def _make_prefixes(self, settings: AdapterSettings) -> BlockPrefixes:
        if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
            raise BaseModelError(
                'adapter.kind = "prefix" does not work with model.gradient-checkpointing = true'
            )
        numbers = self.partition.range_of(self.party)
        blocks = self.model.get_submodule(blocks_of(self.model, len(numbers)))
        devices = {n: _device_of(blocks.get_submodule(str(n))) for n in numbers}
        return BlockPrefixes(
            self.model.config, settings.prefix_length, devices, settings.prefix_dropout
        )

    def _select(self, name: str | None) -> None:
        # Don't use PEFT's method: it freezes all other adapters of a layer, which loses the
        # gradients of their earlier forward passes.
        slot = None if name is None else self._slots[name]
        for layer in self._layers:
            layer._disable_adapters = slot is None
            layer._active_adapter = [slot]
        self._used = name

    def _find_adapted_layers(self) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        self._together = None
        for path, parameter in self.model.named_parameters():
            if "lora_" in path:
                parameter.requires_grad_(True)


def _completed(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def propagate(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Propagate the gradient with respect to a part's output back through the part."""
    with generator_lock:
        gradient = to_device(gradient, output.device, output.dtype)
        output.backward(gradient)  # type: ignore[no-untyped-call]


def _device_of(model: Any) -> torch.device:
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device
