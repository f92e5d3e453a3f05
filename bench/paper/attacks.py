"""The decoders of FL-GLM section 4.3.3, as ``bench.attack`` trains them, on BoolQ."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.attack import cells as attack
from bench.attack.measuring import Attacked
from bench.attack.texts import texts_in
from bench.paper.cells import AttackCell, Result
from bench.paper.sizes import Size
from bench.paper.sources import Sources
from finetuning.model.base_model import load_tokenizer, locate

TASK = "boolq"


def settings_of(size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on."""
    return {"attack": asdict(_sizes(size))}


def measure(cell: AttackCell, size: Size, sources: Sources) -> Result:
    """Return ROUGE, BLEU-4 and the share of tokens that a decoder reads, within 0..1."""
    folder = sources.parts(TASK)[0].parent
    return dict(
        _attacked(locate(sources.model(cell.model)), folder, _sizes(size)).measure(
            attack.Cell(
                data=folder.name,
                attack=cell.decoder,
                head_blocks=cell.head_blocks,
                seed=cell.seed,
            )
        )
    )


def _sizes(size: Size) -> attack.Sizes:
    own = size.fl_glm.attack
    return attack.Sizes(texts=own.texts, longest=own.longest, decoded=own.decoded)


@functools.lru_cache(maxsize=1)
def _attacked(directory: Path, folder: Path, sizes: attack.Sizes) -> Attacked:
    return Attacked(directory, texts_in(folder, load_tokenizer(directory), sizes.texts), sizes)
