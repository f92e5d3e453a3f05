"""BERTScore (FedJudge section 4.2.2), with the ``bert-score`` library, an optional dependency."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetuning.errors import UserError

# ``model_max_length`` is larger than this if the tokenizer doesn't know the encoder's maximum.
_NO_LENGTH = 10**9


class EncoderError(UserError, ValueError):
    """An encoder can't be used; the message states the reason and the remedy."""


@dataclass(frozen=True)
class Encoder:
    """The model whose hidden states are compared."""

    path: str  # Hugging Face id or folder
    layer: int  # the layer of the compared hidden states, counted from 1


def find_encoder(name: str, layer: int | None) -> Encoder:
    """Return the encoder with a Hugging Face id or folder.

    If the layer is None, the library's default is used, or the last layer for an encoder that the
    library doesn't know. Raise `EncoderError` if the library, the encoder or its layer is missing.
    """
    if find_spec("bert_score") is None:
        raise EncoderError("BERTScore needs a library: pip install 'chambers[bertscore]'")
    from bert_score.utils import model2layers
    from transformers import AutoConfig

    folder = Path(name).expanduser()
    if folder.is_absolute() and not folder.is_dir():
        raise EncoderError(f"there is no folder {folder}")
    path = str(folder) if folder.is_dir() else name
    try:
        layers = AutoConfig.from_pretrained(path, trust_remote_code=False).num_hidden_layers
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(f"the encoder {path} can't be used: {error}") from error
    layer = layer or int(model2layers.get(path, layers))
    if not 1 <= layer <= layers:
        raise EncoderError(f"the encoder {path} has layers 1 to {layers}, not {layer}")
    return Encoder(path, layer)


def bertscore(predictions: Sequence[str], references: Sequence[str], encoder: Encoder) -> float:
    """Return the mean F1 of BERTScore, without rescaling, usually within 0..1.

    An empty prediction scores 0. Raise an EncoderError if the encoder can't be loaded.
    """
    # Exclude empty texts, for which the library would warn and compare a single token.
    kept = [(p, r) for p, r in zip(predictions, references, strict=True) if p.strip()]
    if not kept:
        return 0.0
    try:
        _, _, f1 = _scorer(encoder).score(*map(list, zip(*kept, strict=True)))
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(f"the encoder {encoder.path} can't be used: {error}") from error
    return float(f1.double().sum()) / len(predictions)


@functools.lru_cache(maxsize=1)
def _scorer(encoder: Encoder) -> Any:
    """Load an encoder, and cache it, because loading takes longer than scoring a few texts."""
    from bert_score import BERTScorer

    scorer = BERTScorer(model_type=encoder.path, num_layers=encoder.layer)
    tokenizer, config = scorer._tokenizer, scorer._model.config
    if tokenizer.model_max_length > _NO_LENGTH:
        # The library truncates texts to this length. Some encoders' positions begin at 2.
        tokenizer.model_max_length = getattr(config, "max_position_embeddings", 512) - 2
    return scorer
