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
from finetuning.errors import BaseModelError
from finetuning.files import cache_directory, write_file
from finetuning.model.backbone_inputs import left_padding
from finetuning.model.base_model import load_checkpoint, outline, refuse_unless_causal, text_config
from finetuning.model.fingerprint import digest_config
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.adapters import join_adapters
from split.model.generation import generate
from split.model.key_values import KeyValues
from split.model.loading import load_parts
from split.model.miniature import build_miniature
from split.model.partition import PARTIES, Partition
from split.protocol.frames import Padding

_PREFIX = AdapterSettings(kind="prefix", prefix_length=5)
# Length of the longest row; longer than the sliding windows of a miniature.
_COLUMNS = 9
_NEW_TOKENS = 4
# Relative tolerance for logits that are computed with caches of different sizes.
_ROUNDING = 1e-4


@one_at_a_time()
def check_exactness(
    directory: Path,
    settings: ModelSettings,
    partition: Partition,
    prefixes: bool = False,
    generation: bool = False,
) -> None:
    """Check that the parts compute the whole model's results bit for bit.

    Generated texts must have the same tokens as those of the whole model, and the same logits
    except for rounding.

    The test model is randomly initialised, with the real depth and small widths, and is loaded in
    the same way as the real model. If requested, prefixes and text generation are tested, too.
    Success is cached by configuration, code, and versions of torch, transformers and peft.

    Raise a BaseModelError that names the architecture if the results differ, or the architecture is
    not causal or cannot be tested.
    """
    facts = [digest_config(directory / "config.json"), astuple(partition), prefixes, generation]
    mark = cache_directory() / "exactness" / _key(facts)
    if mark.is_file():
        return
    architecture = type(outline(directory)).__name__
    try:
        models = _TestModels(directory, settings, partition)
        reason = models.difference(generation)
        if prefixes and not reason:
            models.add_prefixes()
            reason = models.difference(generation)
    except BaseModelError as error:
        reason = str(error)
    except Exception as error:  # unsupported architectures can raise any exception
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise BaseModelError(
            f"{architecture} can't be split into {partition.head} head, "
            f"{len(partition.range_of('body'))} body and {partition.tail} tail blocks: {reason}. "
            "Use a different base model, or a strategy without split learning"
        )
    write_file(mark, architecture)


class _TestModels:
    """A small model as a whole and in parts, and texts of different lengths to compare them on."""

    def __init__(self, directory: Path, settings: ModelSettings, partition: Partition) -> None:
        with TemporaryDirectory() as folder:
            build_miniature(text_config(directory)).save_pretrained(folder)
            self._whole = load_checkpoint(Path(folder), dtype=torch.float32)
            self._parts = load_parts(
                settings=settings.model_copy(update={"dtype": "float32", "quantization": "none"}),
                directory=Path(folder),
                partition=partition,
                parties=PARTIES,
                devices=["cpu"],
            )
        # Copy the weights, because rounding in matrix products depends on the memory alignment,
        # which is arbitrary in a memory-mapped file.
        for parameter in self._whole.parameters():
            parameter.data = parameter.data.clone()
        refuse_unless_causal(self._whole, directory)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(2, 60, (3, _COLUMNS), generator=generator)
        self._lengths = torch.tensor([_COLUMNS, _COLUMNS - 2, 3])
        self._prefixes: BlockPrefixes | None = None
        self._with_prefixes = ""

    @torch.no_grad()
    def add_prefixes(self) -> None:
        """Attach the same random prefixes to the whole model and to the parts."""
        blocks = range(self._parts["head"].partition.blocks)
        devices = dict.fromkeys(blocks, self._whole.device)
        self._prefixes = BlockPrefixes(self._whole.config, _PREFIX.prefix_length, devices)
        self._with_prefixes = " with prefixes"
        generator = torch.Generator().manual_seed(1)
        for value in self._prefixes.parameters.values():
            value.normal_(generator=generator)
        for part in self._parts.values():
            part.attach(_PREFIX)
            for name, value in part.trainable().items():
                value.copy_(self._prefixes.parameters[name])

    def difference(self, generation: bool) -> str:
        """Describe how the split model differs from the whole model; return "" if it does not."""
        for side in ("right", "left"):
            for name, of_whole, of_parts in self._both(Padding(side, self._lengths)):
                if not torch.equal(of_whole, of_parts):
                    what = f"{name}{self._with_prefixes}"
                    return f"with padding on the {side}, its {what} differ from the whole model's"
        reason = self._other_texts() if generation else ""
        return f"{reason} (evaluate.generate = false skips this check)" if reason else ""

    @torch.no_grad()
    def _both(self, padding: Padding) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return hidden states and logits of the whole and the split model, except at padding."""
        if padding.side == "right":
            inputs, real = {}, torch.arange(_COLUMNS) < padding.lengths[:, None]
        else:
            inputs = left_padding(self._whole.base_model, padding.lengths, _COLUMNS)
            real = inputs["attention_mask"].bool()

        def inputs_of_whole() -> dict[str, Any]:
            whole = {"input_ids": self._tokens, "use_cache": False, **inputs}
            if self._prefixes is None:
                return whole
            return self._prefixes.before(whole, len(self._tokens), torch.float32)

        hidden = self._whole.base_model(**inputs_of_whole()).last_hidden_state[real]
        logits = self._whole(**inputs_of_whole()).logits[real]
        states = self._tokens
        for party in PARTIES:
            states = self._parts[party](states, padding)
        # Use the same shape as the whole model, because it determines the order of summation.
        output_head = self._parts["tail"].output_head
        split_logits = output_head(inputs_embeds=states, use_cache=False).logits
        return [("hidden states", hidden, states[real]), ("logits", logits, split_logits[real])]

    def _other_texts(self) -> str:
        """Describe a difference between generated texts; return "" if there is none.

        If there are prefixes, the whole model uses PEFT's implementation of prefixes.
        """
        tokens, parts, whole = self._tokens, self._parts, self._whole
        mask = (torch.arange(_COLUMNS) >= _COLUMNS - self._lengths[:, None]).long()
        settings: dict[str, Any] = {
            "do_sample": False,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        body: list[KeyValues] = []

        def exchange(index: int, hidden: torch.Tensor, lengths: torch.Tensor, _: Any) -> Any:
            if not index:
                body[:] = [KeyValues(parts["body"], Padding("left", lengths), hidden.shape[1])]
            return body[0].extend(hidden)

        if self._prefixes is not None:
            whole = attach_adapter(whole, _PREFIX, None)
            load_adapter(whole, join_adapters(part.trainable() for part in parts.values()))
        what = f"texts that it generates{self._with_prefixes}"
        try:
            expected = whole.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=_NEW_TOKENS, **settings
            )
            actual = generate(
                head=parts["head"],
                tail=parts["tail"],
                exchange=exchange,
                tokens=tokens,
                mask=mask,
                new_tokens=_NEW_TOKENS,
                **settings,
            )
        except Exception as error:  # unsupported architectures can raise any exception
            return f"the {what} can't be compared: {type(error).__name__}: {error}"
        if not torch.equal(actual.sequences, expected.sequences):
            return f"the {what} differ from those of the whole model"
        for logits, expected_logits in zip(actual.logits, expected.logits, strict=True):
            if (logits - expected_logits).abs().max() > _ROUNDING * expected_logits.abs().max():
                return f"logits of the {what} differ from those of the whole model"
        return ""


def _key(facts: list[Any]) -> str:
    import peft
    import transformers

    versions = [torch.__version__, transformers.__version__, peft.__version__]
    sources = [Path(__file__).parents[1], Path(finetuning.__file__).parent]
    code = [file.read_text() for folder in sources for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(json.dumps([facts, versions, code]).encode()).hexdigest()
