"""An institution: its name and tokenized data, cached in a ClientApp process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.common import log

from client_app.data import read_client_data
from client_app.row_ledger import digest_of_row
from federation.messages import Instruction
from federation.run_config import RunConfig, Scalar
from finetuning.data.prompts import prompts_of_answers
from finetuning.data.rows import print_left_out
from finetuning.data.tokenization import Example, tokenize
from finetuning.files import Stamps, stamps
from finetuning.model.fingerprint import fingerprint
from finetuning.model.locating import locate
from finetuning.model.names import resolve
from finetuning.model.positions import check_positions
from finetuning.model.tokenizer import load_tokenizer
from finetuning.randomness import derive_seed
from split.model.exactness import check_exactness
from split.model.loading import locate_parts, tensors_of
from split.model.partition import PartyName, partition_of

# The parts of a split model that run at a client.
PARTS: tuple[PartyName, ...] = ("head", "tail")


@dataclass(frozen=True)
class Institution:
    """One client of a run."""

    name: str
    size: int  # number of training rows, |Dᵢ| in FedJudge Eq. 2
    train: list[Example]
    test: list[Example]  # held-out examples
    # Prompts of the held-out rows to generate answers for; empty without ``evaluate.generate``.
    asked: list[Example]
    lines: int  # number of input lines with the training rows; a task may split a line into rows
    rows_divided: int  # number of training rows that were split into several examples
    padding: int  # id of the padding token
    directory: Path  # directory of the base model
    fingerprint: dict[str, str]  # fingerprint of the base model, or of the client's parts of it
    row_digests: dict[str, list[bytes]]  # of the rows of "training" and "held-out"
    model_files: Stamps  # stamps of the base model's files, and of the GGUF file, if any
    data_files: Stamps

    def rows_used(self, kind: str, instruction: Instruction, tests_leaks: bool) -> list[bytes]:
        """Return the digests of the rows that a train or evaluate message uses."""
        trains = kind == "train" or instruction.importance or tests_leaks
        asks = (kind == "evaluate" and instruction.losses) or tests_leaks
        digests = self.row_digests
        return [*(digests["training"] if trains else []), *(digests["held-out"] if asks else [])]

    def drawn(self, seed: int, count: int) -> list[Example]:
        """Return a random sample of at most ``count`` training examples, given a run's seed."""
        generator = torch.Generator().manual_seed(derive_seed("importance", seed, self.name))
        order = torch.randperm(len(self.train), generator=generator)
        return [self.train[i] for i in order[:count]]


def base_model_of(config: RunConfig) -> tuple[Path, dict[str, str]]:
    """Return the directory and the fingerprint of a client's part of the base model.

    Raise ``BaseModelError`` if the base model can't be found, or can't be split exactly.
    """
    if not config.method.is_split:
        directory = locate(config.model.name)
        return directory, fingerprint(directory)
    directory = locate_parts(config.model.name, config.split, PARTS)
    partition = partition_of(directory, config.split)
    prefixes, generation = config.adapter.kind == "prefix", config.evaluate.generate
    check_exactness(directory, config.model, partition, prefixes, generation)
    return directory, fingerprint(directory, tensors_of(directory, partition, PARTS))


def open_institution(config: RunConfig, node: Mapping[str, Scalar]) -> Institution:
    """Read and tokenize a client's data; cache the result per client until a file changes.

    Raise ``DataError`` if the data is missing or malformed, or ``BaseModelError`` if the base model
    can't be found.
    """
    items = tuple(sorted(node.items()))
    institution = _open(config, items)
    stamped = institution.model_files, institution.data_files
    if stamped != (_model_files(config, institution.directory), _data_files(node)):
        _open.cache_clear()
        institution = _open(config, items)
    return institution


def release_data() -> None:
    """Release the cached data of all clients."""
    _open.cache_clear()


def _model_files(config: RunConfig, directory: Path) -> Stamps:
    source = Path(resolve(config.model.name)).expanduser()
    return stamps(directory) + (stamps(source) if source.is_file() else ())


def _data_files(node: Mapping[str, Scalar]) -> Stamps:
    """Return the stamps of an institution's data files; simulated clients have none."""
    path = str(node.get("data-path", ""))
    return stamps(Path(path).expanduser()) if path else ()


# Keep several clients' data: an actor of a simulation runs several clients in turn.
@lru_cache(maxsize=16)
def _open(config: RunConfig, node: tuple[tuple[str, Scalar], ...]) -> Institution:
    directory, digests = base_model_of(config)
    # Record the stamps before reading the files, so that later changes are detected.
    model_files, data_files = _model_files(config, directory), _data_files(dict(node))
    data = read_client_data(config.data, dict(node), config.seed)
    check_positions(directory, config.row_with_answer)
    tokenizer = load_tokenizer(directory)
    parts, divided, used = {}, {}, {}
    leave_out = print_left_out if config.data.skip_bad_rows else None
    for part, rows in (("training", data.train), ("held-out", data.test)):
        parts[part], report = tokenize(rows, tokenizer, config.data.max_length, leave_out)
        divided[part] = report.rows_divided
        used[part] = [row for i, row in enumerate(rows) if i not in report.rejected]
        log(INFO, "%s: %d %s examples", data.name, len(parts[part]), part)
        if report.cut:
            text = "%s: of the %s examples: %s (data.max-length = %d)"
            log(WARNING, text, data.name, part, report.cut, config.data.max_length)
        if unused := dict.fromkeys(key for row in rows for key in row.unused):
            log(WARNING, "%s: columns not used: %s", data.name, ", ".join(unused))
        if report.without_end_mark:
            text = (
                "%s: the chat template writes no end mark after the answers of %d %s examples, so "
                "a model can't learn from these examples to end an answer"
            )
            log(WARNING, text, data.name, report.without_end_mark, part)
    asked: list[Example] = []
    if config.evaluate.generate:
        rows = used["held-out"][: config.evaluate.generate_examples]
        asked = prompts_of_answers(rows, tokenizer, config.data.max_length)
    return Institution(
        name=data.name,
        size=len(used["training"]),
        train=parts["training"],
        test=parts["held-out"],
        asked=asked,
        lines=len({row.origin for row in used["training"]}),
        rows_divided=divided["training"],
        padding=tokenizer.pad_token_id,
        directory=directory,
        fingerprint=digests,
        row_digests={part: [digest_of_row(r.fields) for r in rows] for part, rows in used.items()},
        model_files=model_files,
        data_files=data_files,
    )
