"""An institution: its name, its tokenized data and the model, as one ClientApp process has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from client_app.data import read_client_data
from finetuning.adapters.adapter import attach_adapter
from finetuning.data.tokenization import Example, tokenize
from finetuning.model.base_model import load_base_model, load_tokenizer, locate
from finetuning.model.fingerprint import fingerprint
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, DataSettings, ModelSettings, SplitSettings
from split.model.cut import PartyName, cut_of
from split.model.exactness import check_exactness
from split.model.loading import load_parts, locate_parts, tensors_of
from split.model.part import Part
from strategies.run_config import RunConfig, Scalar

# What a client holds of a split model.
ENDS: tuple[PartyName, ...] = ("head", "tail")


@dataclass(frozen=True)
class Institution:
    """One client of a run.

    Attributes:
        name: chosen by the institution.
        size: number of training rows, |Dᵢ| of FedJudge Eq. 2.
        train: tokenized training examples.
        test: tokenized held-out examples.
        padding: the padding token.
        directory: of the base model.
        fingerprint: of the base model, or of the parts that are held here, as computed here.

    """

    name: str
    size: int
    train: list[Example]
    test: list[Example]
    padding: int
    directory: Path
    fingerprint: dict[str, str]


def open_institution(config: RunConfig, node: Mapping[str, Scalar]) -> Institution:
    """Read and tokenize a client's data; a process that stays alive does so once.

    Raises:
        DataError: the data is missing or malformed.
        BaseModelError: the base model can't be found.

    """
    split = config.split if config.strategy == "fl-glm" else None
    return _open(
        config.model,
        config.adapter,
        split,
        config.evaluate.generate,
        config.data,
        config.seed,
        tuple(sorted(node.items())),
    )


@lru_cache(maxsize=1)
def load_ends(
    model: ModelSettings, adapter: AdapterSettings, split: SplitSettings
) -> dict[PartyName, Part]:
    """Give the head and the tail of a split model with adapters; loaded once per process.

    The adapters' weights are whatever the last message left: set them before use.

    Raises:
        BaseModelError: the model can't be loaded.

    """
    directory = locate_parts(model.name, split, ENDS)
    parts = load_parts(model, directory, cut_of(directory, split), ENDS)
    for part in parts.values():
        part.attach(adapter)
    return parts


@lru_cache(maxsize=1)
def load_model(model: ModelSettings, adapter: AdapterSettings) -> tuple[WholeModel, Any]:
    """Give the model with an adapter, and its tokenizer; loaded once per process.

    The adapter's weights are whatever the last message left: set them before use.

    Raises:
        BaseModelError: the model can't be loaded, or the adapter doesn't fit.

    """
    base = load_base_model(model)
    return WholeModel(attach_adapter(base.model, adapter, base.reference)), base.tokenizer


# A simulation's actor serves several clients in turn.
@lru_cache(maxsize=16)
def _open(
    model: ModelSettings,
    adapter: AdapterSettings,
    split: SplitSettings | None,
    generate: bool,
    settings: DataSettings,
    seed: int,
    node: tuple[tuple[str, Scalar], ...],
) -> Institution:
    if split is None:
        directory = locate(model.name)
        digests = fingerprint(directory)
    else:
        directory = locate_parts(model.name, split, ENDS)
        cut = cut_of(directory, split)
        check_exactness(directory, model, cut, adapter.kind == "prefix", generate)
        digests = fingerprint(directory, tensors_of(directory, cut, ENDS))
    data = read_client_data(settings, dict(node), seed)
    tokenizer = load_tokenizer(directory)
    parts = {}
    for part, rows in (("training", data.train), ("held-out", data.test)):
        parts[part], report = tokenize(rows, tokenizer, settings.max_length)
        log(INFO, "%s: %d %s examples", data.name, len(parts[part]), part)
        if report.inputs_shortened or report.outputs_cut or report.left_out:
            log(
                WARNING,
                "%s: of the %s examples %d have shortened inputs, %d have outputs that don't fit "
                "and were cut, %d were left out (data.max-length = %d)",
                data.name,
                part,
                report.inputs_shortened,
                report.outputs_cut,
                report.left_out,
                settings.max_length,
            )
    return Institution(
        data.name,
        len(data.train),
        parts["training"],
        parts["held-out"],
        tokenizer.pad_token_id,
        directory,
        digests,
    )
