"""The check before a run that an architecture computes in parts exactly what it does as a whole."""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from finetuning.base_model import BaseModelError, refuse_unless_causal
from finetuning.files import cache_directory, replacing
from finetuning.fingerprint import config_digest
from finetuning.settings import ModelSettings
from split.loading import load_parts
from split.miniature import miniature
from split.partition import PARTIES, Cut, PartyName, outline
from split.parts import Padding, Part, left_padding

# Tokens per row, of which some rows have fewer; more than the sliding windows of a miniature.
_COLUMNS = 9


def check_exactness(directory: Path, settings: ModelSettings, cut: Cut) -> None:
    """Refuse an architecture whose parts don't compute what the whole model does, bit for bit.

    A random model of the real depth and tiny width goes through the same loading as the real one.
    What was found exact is remembered for the versions of torch and transformers.

    Raises:
        BaseModelError: it isn't exact, isn't causal, or can't be tried; the message names it.

    """
    mark = cache_directory() / "exactness" / _key(directory, cut)
    if mark.is_file():
        return
    architecture = type(outline(directory)).__name__
    try:
        reason = _difference(directory, settings, cut)
    except BaseModelError as error:
        reason = str(error)
    except Exception as error:  # Whatever an architecture that doesn't fit may raise.
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise BaseModelError(
            f"{architecture} can't be used in split learning, cut into {cut.head}, "
            f"{cut.blocks - cut.head - cut.tail} and {cut.tail} blocks: {reason}. Use another base "
            "model, or a strategy that keeps it whole"
        )
    with replacing(mark) as aside:
        aside.write_text(architecture)


def _difference(directory: Path, settings: ModelSettings, cut: Cut) -> str:
    """Say where split and whole differ; empty where they don't."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = settings.model_copy(update={"dtype": "float32", "quantization": "none"})
    with TemporaryDirectory() as place:
        miniature(AutoConfig.from_pretrained(directory)).save_pretrained(place)
        whole = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        parts = load_parts(plain, Path(place), cut, PARTIES, "cpu")
    # Products round differently by where in memory their factors begin; in a mapped file anywhere.
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    refuse_unless_causal(whole, directory)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 60, (3, _COLUMNS), generator=generator)
    lengths = torch.tensor([_COLUMNS, _COLUMNS - 2, 3])
    for side in ("right", "left"):
        padding = Padding(side, lengths)
        for name, whole_value, split_value in _both(whole, parts, tokens, padding):
            if not torch.equal(whole_value, split_value):
                return f"its {name} are not those of the whole model, with padding on the {side}"
    return ""


@torch.no_grad()
def _both(
    whole: Any, parts: dict[PartyName, Part], tokens: torch.Tensor, padding: Padding
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Compute hidden states and logits of the tokens that aren't padding, whole and split."""
    columns = torch.arange(tokens.shape[1])
    if padding.side == "right":
        inputs, real = {}, columns < padding.lengths[:, None]
    else:
        inputs = left_padding(whole.base_model, padding.lengths, tokens.shape[1])
        real = inputs["attention_mask"].bool()
    hidden = whole.base_model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state[real]
    logits = whole(input_ids=tokens, use_cache=False, **inputs).logits[real]
    given = tokens
    for party in PARTIES:
        given = parts[party](given, padding)
    # In the shape that the whole model's have: other shapes may be multiplied in another order.
    split_logits = parts["tail"].output_head(inputs_embeds=given, use_cache=False).logits
    return [("hidden states", hidden, given[real]), ("logits", logits, split_logits[real])]


def _key(directory: Path, cut: Cut) -> str:
    import peft
    import transformers

    facts = [config_digest(directory / "config.json"), astuple(cut)]
    versions = [torch.__version__, transformers.__version__, peft.__version__]
    code = [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(json.dumps([facts, versions, code]).encode()).hexdigest()
