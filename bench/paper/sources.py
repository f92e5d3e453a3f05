"""Where base models and the tasks' files are found."""

import functools
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from finetuning.data.formats import DataError
from finetuning.data.rows import find_part
from finetuning.files import Stamps, stamps
from finetuning.model.base_model import BaseModelError, locate
from finetuning.model.fingerprint import digest, fingerprint
from finetuning.tasks.tasks import TASKS


class SourceError(ValueError):
    """A model or data is missing; the message says what to name, and where."""


class MissingDataError(SourceError):
    """The folder of data doesn't have a task's files."""


@dataclass(frozen=True)
class Sources:
    """Folders with data and models.

    Attributes:
        data: Folder with the tasks' folders, in it or in ``superglue/`` and ``legal/``.
        models: Folder with a folder for each base model, named like the last part of its id; models
            that are not there come from the Hugging Face Hub or its cache.
        sheets: The key of a human evaluation and the sheets that annotators have filled in
            (``docs/human-evaluation.md``); empty if there are none.

    """

    data: Path | None = None
    models: Path | None = None
    sheets: tuple[Path, ...] = ()

    def model(self, identifier: str) -> str:
        """Return a base model's name for ``model.name``: its folder, or its id."""
        folder = self.models and self.models.absolute() / identifier.rpartition("/")[2]
        return str(folder) if folder and folder.is_dir() else identifier

    def model_digest(self, identifier: str) -> str:
        """Return a digest of a base model's weights and configuration.

        Raises:
            SourceError: The model can't be found.

        """
        try:
            directory = locate(self.model(identifier))
        except BaseModelError as error:
            where = f"--models {self.models}" if self.models else "a folder that --models names"
            folder = identifier.rpartition("/")[2]
            raise SourceError(f"there is no {folder} in {where}: {error}") from error
        return digest(fingerprint(directory))[:16]

    def folder(self, name: str) -> Path:
        """Return a folder of the data by its name, in any case.

        Raises:
            MissingDataError: There is none.
            SourceError: There is no data at all.

        """
        if self.data is None:
            raise SourceError(f"--data is missing: a folder that has {name}")
        if not self.data.is_dir():
            raise SourceError(f"--data {self.data}: there is no such folder")
        for parent in (self.data, *sorted(f for f in self.data.glob("*") if f.is_dir())):
            for folder in sorted(parent.iterdir()):
                if folder.is_dir() and folder.name.lower() == name.lower():
                    return folder.absolute()
        raise MissingDataError(f"--data {self.data}: there is no folder {name} in it")

    def parts(self, task: str) -> tuple[Path, Path]:
        """Return the files of a task's training rows and held-out rows.

        Raises:
            MissingDataError: One of them is missing.
            SourceError: The data can't be read.

        """
        folder, held_out = self.folder(TASKS[task].folder), TASKS[task].held_out
        try:
            train, test = find_part(folder, "train"), find_part(folder, held_out)
        except DataError as error:
            raise SourceError(str(error)) from error
        if train is None or test is None:
            missing = held_out if train else "train"
            raise MissingDataError(f"{task}: there is no {folder / missing}.jsonl")
        return train, test

    def data_digest(self, task: str) -> str:
        """Return a digest of a task's files."""
        digests = (_file_digest(file, stamps(file)) for file in self.parts(task))
        return sha256(b"".join(digests)).hexdigest()[:16]


@functools.cache
def _file_digest(file: Path, _stamps: Stamps) -> bytes:
    return sha256(file.read_bytes()).digest()
