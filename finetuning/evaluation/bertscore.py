"""BERTScore (FedJudge section 4.2.2), by the ``bert-score`` library; an optional dependency."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class EncoderError(ValueError):
    """An encoder can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class Encoder:
    """The model that compares texts.

    Attributes:
        name: Hugging Face id or folder.
        layer: Layer whose hidden states are compared, from 1; None for the library's choice, or the
            last one of an encoder that it doesn't know.

    """

    name: str
    layer: int | None

    def check(self) -> None:
        """Check that the library is installed and that a folder exists.

        Raises:
            EncoderError: One of them is missing.

        """
        if find_spec("bert_score") is None:
            raise EncoderError("BERTScore needs the library: pip install 'chambers[bertscore]'")
        path = Path(self.name).expanduser()
        if path.is_absolute() and not path.is_dir():
            raise EncoderError(f"there is no folder {path}")


def bertscore(predictions: Sequence[str], references: Sequence[str], encoder: Encoder) -> float:
    """Return the mean F1 of BERTScore, without rescaling, usually within 0..1.

    Args:
        predictions: Generated texts. An empty one scores 0.
        references: The texts that were hoped for.
        encoder: The encoder.

    Raises:
        EncoderError: The encoder can't be loaded, or has no such layer.

    """
    from bert_score.utils import model2layers
    from transformers import AutoConfig

    path = Path(encoder.name).expanduser()
    name = str(path) if path.is_dir() else encoder.name
    # The library warns of empty texts, and one token would be left of them.
    kept = [(p, r) for p, r in zip(predictions, references, strict=True) if p.strip()]
    if not kept:
        return 0.0
    try:
        layers = AutoConfig.from_pretrained(name, trust_remote_code=False).num_hidden_layers
        layer = encoder.layer or model2layers.get(name, layers)
        if not 1 <= layer <= layers:
            raise EncoderError(f"the encoder {name} has layers 1 to {layers}, not {layer}")
        _, _, f1 = _scorer(name, layer).score(*map(list, zip(*kept, strict=True)))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, EncoderError):
            raise
        raise EncoderError(f"the encoder {name} can't be used: {error}") from error
    return float(f1.double().sum()) / len(predictions)


@functools.lru_cache(maxsize=1)
def _scorer(name: str, layer: int) -> Any:
    """Load an encoder, which takes longer than to score a few texts."""
    from bert_score import BERTScorer

    return BERTScorer(model_type=name, num_layers=layer)
