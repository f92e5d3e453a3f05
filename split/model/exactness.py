"""Check before a run that a split model computes exactly the same results as the whole model."""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import finetuning
from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.prefixes import BlockPrefixes
from finetuning.files import cache_directory, replacing
from finetuning.model.base_model import BaseModelError, refuse_unless_causal
from finetuning.model.fingerprint import config_digest
from finetuning.model.left_padding import left_padding
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.adapters import join_adapters
from split.model.generation import Generation
from split.model.key_values import KeyValues
from split.model.loading import load_parts
from split.model.miniature import miniature
from split.model.part import Part
from split.model.partition import PARTIES, Partition, PartyName, outline
from split.protocol.frames import Padding

_PREFIX = AdapterSettings(kind="prefix", prefix_length=5)
# Length of the longest row; longer than the sliding windows of a miniature.
_COLUMNS = 9
_NEW_TOKENS = 4
# Relative tolerance for logits that are computed with caches of different sizes.
_ROUNDING = 1e-4


def check_exactness(
    directory: Path,
    settings: ModelSettings,
    partition: Partition,
    prefixes: bool = False,
    generation: bool = False,
) -> None:
    """Raise an error unless the parts compute the whole model's results bit for bit.

    Generated texts must have the same tokens as those of the whole model, and the same logits
    except for rounding.

    The test model is randomly initialised, with the real depth and small widths, and is loaded in
    the same way as the real one. Success is cached per version of code, torch, transformers, peft.

    Args:
        directory: Directory of the checkpoint.
        settings: Settings of the model.
        partition: Number of blocks of each party.
        prefixes: Whether to test the blocks with prefixes, too.
        generation: Whether to test text generation, too.

    Raises:
        BaseModelError: The results differ, or the architecture is not causal or cannot be tested.
            The message names the architecture.

    """
    mark = (
        cache_directory()
        / "exactness"
        / _key(directory=directory, partition=partition, prefixes=prefixes, generation=generation)
    )
    if mark.is_file():
        return
    architecture = type(outline(directory)).__name__
    try:
        reason = _difference(
            directory=directory,
            settings=settings,
            partition=partition,
            prefixes=prefixes,
            generation=generation,
        )
    except BaseModelError as error:
        reason = str(error)
    except Exception as error:  # unsupported architectures can raise any exception
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise BaseModelError(
            f"{architecture} can't be used in split learning, divided into "
            f"{partition.head}, {len(partition.range_of('body'))} and {partition.tail} blocks: "
            f"{reason}. Use another base model, or a strategy that keeps it whole"
        )
    with replacing(mark) as aside:
        aside.write_text(architecture)


def _difference(
    directory: Path, settings: ModelSettings, partition: Partition, prefixes: bool, generation: bool
) -> str:
    """Describe a difference between split and whole model; return "" if there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = settings.model_copy(update={"dtype": "float32", "quantization": "none"})
    with TemporaryDirectory() as folder:
        miniature(AutoConfig.from_pretrained(directory, trust_remote_code=False)).save_pretrained(
            folder
        )
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        parts = load_parts(
            settings=plain,
            directory=Path(folder),
            partition=partition,
            parties=PARTIES,
            devices=["cpu"],
        )
    # Copy the weights, because rounding in matrix products depends on the memory alignment, which
    # is arbitrary in a memory-mapped file.
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    refuse_unless_causal(whole, directory)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 60, (3, _COLUMNS), generator=generator)
    lengths = torch.tensor([_COLUMNS, _COLUMNS - 2, 3])
    for chosen in [None, _give_prefixes(whole, parts, partition)] if prefixes else [None]:
        for side in ("right", "left"):
            padding = Padding(side, lengths)
            for name, whole_value, split_value in _both(
                whole=whole, parts=parts, tokens=tokens, padding=padding, prefixes=chosen
            ):
                if not torch.equal(whole_value, split_value):
                    what = f"{name} with prefixes" if chosen else name
                    return f"its {what} are not those of the whole model, padded on the {side}"
        if generation and (
            reason := _other_texts(
                whole=whole, parts=parts, tokens=tokens, lengths=lengths, prefixes=bool(chosen)
            )
        ):
            return f"{reason} (evaluate.generate = true; false may work)"
    return ""


@torch.no_grad()
def _give_prefixes(whole: Any, parts: dict[PartyName, Part], partition: Partition) -> BlockPrefixes:
    """Attach random prefixes to the parts, and return the same prefixes for the whole model."""
    devices = dict.fromkeys(range(partition.blocks), whole.device)
    result = BlockPrefixes(whole.config, _PREFIX.prefix_length, devices)
    generator = torch.Generator().manual_seed(1)
    for value in result.parameters.values():
        value.normal_(generator=generator)
    for part in parts.values():
        part.attach(_PREFIX)
        for name, value in part.trainable().items():
            value.copy_(result.parameters[name])
        part.use(None)
    return result


@torch.no_grad()
def _both(
    whole: Any,
    parts: dict[PartyName, Part],
    tokens: torch.Tensor,
    padding: Padding,
    prefixes: BlockPrefixes | None,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Compute hidden states and logits with the whole and the split model, excluding padding."""
    columns = torch.arange(tokens.shape[1])
    if padding.side == "right":
        inputs, real = {}, columns < padding.lengths[:, None]
    else:
        inputs = left_padding(whole.base_model, padding.lengths, tokens.shape[1])
        real = inputs["attention_mask"].bool()

    def given_to_whole() -> dict[str, Any]:
        given = {"input_ids": tokens, "use_cache": False, **inputs}
        return prefixes.before(given, len(tokens), torch.float32) if prefixes else given

    hidden = whole.base_model(**given_to_whole()).last_hidden_state[real]
    logits = whole(**given_to_whole()).logits[real]
    given = tokens
    for party in PARTIES:
        parts[party].use("default" if prefixes else None)
        given = parts[party](given, padding)
    # Use the same shape as the whole model, because the order of summation depends on the shape.
    split_logits = parts["tail"].output_head(inputs_embeds=given, use_cache=False).logits
    return [("hidden states", hidden, given[real]), ("logits", logits, split_logits[real])]


def _other_texts(
    whole: Any,
    parts: dict[PartyName, Part],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    prefixes: bool,
) -> str:
    """Describe a difference between texts of whole and split model; return "" if there is none.

    The whole model uses PEFT's own implementation of prefixes.
    """
    mask = (torch.arange(_COLUMNS) >= _COLUMNS - lengths[:, None]).long()
    settings = {
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    body: list[KeyValues] = []

    def exchange(index: int, hidden: torch.Tensor, lengths: torch.Tensor, _: Any) -> torch.Tensor:
        if not index:
            body[:] = [KeyValues(parts["body"], Padding("left", lengths), hidden.shape[1])]
        return body[0].extend(hidden)

    for part in parts.values():
        part.use("default" if prefixes else None)
    if prefixes:
        whole = attach_adapter(whole, _PREFIX, None)
        load_adapter(whole, join_adapters(part.trainable() for part in parts.values()))
    what = "texts that it generates" + (" with prefixes" if prefixes else "")
    try:
        expected = whole.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=_NEW_TOKENS, **settings
        )
        generation = Generation(
            head=parts["head"],
            tail=parts["tail"],
            mask=mask,
            new_tokens=_NEW_TOKENS,
            exchange=exchange,
        )
        found = generation.run(tokens, mask, settings)
    except Exception as error:  # unsupported architectures can raise any exception
        return f"the {what} can't be compared: {type(error).__name__}: {error}"
    if not torch.equal(found.sequences, expected.sequences):
        return f"the {what} are not those of the whole model"
    for own, theirs in zip(found.logits, expected.logits, strict=True):
        if (own - theirs).abs().max() > _ROUNDING * theirs.abs().max():
            return f"logits of the {what} are not those of the whole model"
    return ""


def _key(directory: Path, partition: Partition, prefixes: bool, generation: bool) -> str:
    import peft
    import transformers

    facts = [config_digest(directory / "config.json"), astuple(partition), prefixes, generation]
    versions = [torch.__version__, transformers.__version__, peft.__version__]
    sources = [Path(__file__).parents[1], Path(finetuning.__file__).parent]
    code = [file.read_text() for folder in sources for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(json.dumps([facts, versions, code]).encode()).hexdigest()
