"""Load a part of a model: download and read only its tensors, and verify all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.quantizers.base import get_keys_to_not_convert

from finetuning.errors import BaseModelError
from finetuning.model.base_model import (
    TEXT_TENSORS,
    freeze,
    generation_settings,
    loading_arguments,
    outline,
    refuse_incomplete,
)
from finetuning.model.checkpoint import INDEX, WEIGHTS, read_index, refuse_quantized
from finetuning.model.locating import DESCRIPTIONS, fetch, locate, locate_description
from finetuning.model.names import is_id, resolve
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.placement import hand_over
from finetuning.model.tensor_names import full_names
from finetuning.settings import ModelSettings
from split.model.checkpoint import Checkpoint, StoredTensor, compare_with_checkpoint, equals_stored
from split.model.devices import map_of_part
from split.model.part import Part
from split.model.partition import (
    PARTIES,
    Partition,
    PartyName,
    part_class,
    partition_of,
    tensors_of_part,
    tied_pairs,
)
from split.settings import SplitSettings


def locate_parts(name: str, split: SplitSettings, parties: Sequence[PartyName]) -> Path:
    """Return the directory of a checkpoint (``model.name``).

    Of a sharded checkpoint, download only the files with tensors of these parties. Raise a
    BaseModelError if there is no such checkpoint, or it is not in safetensors format.
    """
    name = resolve(name)
    directory = locate_description(name)
    if not is_id(name):
        return directory
    if (directory / INDEX).is_file():
        needed = tensors_of(directory, partition_of(directory, split), parties)
        files = _files(directory)
        return fetch(name, [*DESCRIPTIONS, *sorted({files[tensor] for tensor in needed})])
    return locate(name)


def tensors_of(directory: Path, partition: Partition, parties: Sequence[PartyName]) -> set[str]:
    """Return the names of the checkpoint's tensors that these parties need.

    If the checkpoint has an index, the files listed there need not exist.
    """
    whole = outline(directory)
    full = full_names(whole, _files(directory))
    parts = [
        tensors_of_part(whole=whole, full=full, partition=partition, party=party)
        for party in parties
    ]
    return {name for part in parts for name in part.values()}


def load_parts(
    settings: ModelSettings,
    directory: Path,
    partition: Partition,
    parties: Sequence[PartyName],
    devices: Sequence[str] = (),
) -> dict[PartyName, Part]:
    """Load the parts of one process. Tied embeddings share one tensor in memory.

    The blocks of each part are spread over ``devices``, in order. Without ``devices``, use the
    first GPU, or the CPU if there is no GPU. Raise a BaseModelError if a part cannot be loaded, or
    a tensor differs from the checkpoint.
    """
    whole = outline(directory)
    refuse_quantized(directory)
    arguments = loading_arguments(settings, *devices[:1])
    if arguments["quantization_config"] is not None:
        # Only the whole model's last layer stays unquantised, not the last layer of each part.
        arguments["quantization_config"].llm_int8_skip_modules = get_keys_to_not_convert(whole)
    full = full_names(whole, _files(directory))
    parts: dict[PartyName, Part] = {}
    held: dict[str, tuple[str, torch.Tensor]] = {}  # see ``_shared``
    checkpoint = Checkpoint(directory)
    for party in (party for party in PARTIES if party in parties):
        sources = tensors_of_part(whole=whole, full=full, partition=partition, party=party)
        absent = sorted(set(sources.values()) - checkpoint.files.keys())
        if absent:
            raise BaseModelError(
                f"{len(absent)} tensors, including {absent[0]}, are in no {WEIGHTS} file of "
                f"{directory}; the checkpoint is incomplete, so download it again"
            )
        kind = part_class(whole, partition, party)
        state = {
            key: StoredTensor(checkpoint, name, arguments["dtype"]) for key, name in sources.items()
        } | _shared(whole=whole, checkpoint=checkpoint, held=held, sources=sources, full=full)
        if devices:
            arguments["device_map"] = map_of_part(
                whole=whole, partition=partition, party=party, devices=devices
            )
        model = _load(kind=kind, config=whole.config, state=state, arguments=arguments)
        hand_over(model, arguments["device_map"])
        model.generation_config = generation_settings(directory, whole.config)
        digests = compare_with_checkpoint(
            model=model,
            checkpoint=checkpoint,
            sources=sources,
            quantized=settings.quantization != "none",
        )
        freeze(model, settings)
        parts[party] = Part(
            model=model, party=party, partition=partition, digests=digests, dtype=arguments["dtype"]
        )
        names = {full.get(key, key): name for key, name in sources.items()}
        held |= {
            key: (names[key], value) for key, value in model.named_parameters() if key in names
        }
    return parts


def _files(directory: Path) -> Mapping[str, Any]:
    """Return the file of each tensor of a checkpoint, from the index file if there is one."""
    return read_index(directory) or Checkpoint(directory).files


@one_at_a_time()
def _load(kind: Any, config: Any, state: Mapping[str, Any], arguments: dict[str, Any]) -> Any:
    """Load a part with ``transformers`` from tensors that are read on demand."""
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            key_mapping=TEXT_TENSORS,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
            output_loading_info=True,
            **arguments,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the checkpoint is not the problem
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BaseModelError(f"{kind.__name__} can't be loaded in parts: {error}") from error
    refuse_incomplete(report, f"the checkpoint of a part of {kind.__name__}")
    return model


def _shared(
    whole: Any,
    checkpoint: Checkpoint,
    held: Mapping[str, tuple[str, torch.Tensor]],
    sources: Mapping[str, str],
    full: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return a part's tied tensors that were loaded for another part, keyed as in ``sources``.

    Some checkpoints store tied tensors twice. Share such tensors only if they are equal. ``held``
    maps names of other parts' weights to their names in the checkpoint and their tensors.
    """
    result = {}
    for one, other in tied_pairs(whole):
        for key, name in sources.items():
            if full.get(key, key) == one and other in held:
                held_name, tensor = held[other]
                if name == held_name or equals_stored(tensor, checkpoint, name):
                    result[key] = tensor.detach()
    return result
