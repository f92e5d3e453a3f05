"""The digest of the code that answers messages, to compare a worker's code with a run's app."""

import hashlib
from pathlib import Path

import client_app
import federation
import finetuning
import split


def code_digest() -> str:
    """Return the SHA-256 digest of the code that answers messages, and of its data files.

    The digest is the same for a checkout, an installed package and the app installed by Flower.
    """
    state = hashlib.sha256()
    for package in (client_app, federation, finetuning, split):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                name = f"{root.name}/{file.relative_to(root).as_posix()}"
                state.update(f"{name}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()
