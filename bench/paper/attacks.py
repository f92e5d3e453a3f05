"""The decoders of FL-GLM section 4.3.3, as ``bench.attack`` trains them, on BoolQ."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.attack import cells as attack
from bench.attack.measuring import Attacked
from bench.attack.texts import texts_in
from bench.paper.cells import AttackCell, Result
from bench.paper.sources import Sources
from finetuning.model.base_model import load_tokenizer, locate

_TASK = "boolq"


def settings_of(cell: AttackCell, sources: Sources) -> dict[str, Any]:
    """Return everything that a cell's result depends on.

    Raises:
        SourceError: Data or the model is missing.

    """
    return {
        "data": sources.data_digest(_TASK),
        "model": sources.model_digest(cell.model),
        "attack": asdict(attack.Sizes()),
    }


def measure(cell: AttackCell, sources: Sources) -> Result:
    """Return ROUGE, BLEU-4 and the share of tokens that a decoder reads, within 0..1."""
    folder = sources.parts(_TASK)[0].parent
    return dict(
        _attacked(locate(sources.model(cell.model)), folder).measure(
            attack.Cell(
                data=folder.name,
                attack=cell.decoder,
                head_blocks=cell.head_blocks,
                seed=cell.seed,
            )
        )
    )


@functools.lru_cache(maxsize=1)
def _attacked(directory: Path, folder: Path) -> Attacked:
    sizes = attack.Sizes()
    return Attacked(directory, texts_in(folder, load_tokenizer(directory), sizes.texts), sizes)
