"""Locate the app's files, presets and templates, in a checkout or in the installed package."""

import shutil
from itertools import takewhile
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parent.parent
_INSTALLED = Path(__file__).resolve().with_name("data")
# In a wheel, required files from the root of the checkout are in a folder of this package.
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGES
_APP = ("server_app", "client_app", "strategies", "federation", "split", "finetuning")

_PRESETS = _ROOT / "presets"
# The pages that help and errors name.
DOCS = _ROOT / "docs"
# Configuration files of a deployment, for the folder /srv/chambers.
TEMPLATES = _ROOT / "docker"


def app_files() -> dict[str, Path]:
    """Return the app's files, keyed by their paths in a release.

    A checkout and a package installed from that checkout yield the same release.
    """
    files = {name: _ROOT / name for name in ("pyproject.toml", "LICENSE")}
    for package in _APP:
        for path in (_PACKAGES / package).rglob("*"):
            if path.suffix in {".py", ".toml"}:
                files[path.relative_to(_PACKAGES).as_posix()] = path
    return files


def write_app(folder: Path) -> Path:
    """Copy the app into a new folder for ``flwr run``, and return the folder."""
    for name, path in app_files().items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return folder


def presets() -> dict[str, Path]:
    """Return the preset files, keyed by names such as ``demo`` or ``baselines/center``."""
    files = sorted(_PRESETS.rglob("*.toml"))
    return {path.relative_to(_PRESETS).with_suffix("").as_posix(): path for path in files}


def describe_presets() -> list[str]:
    """Return a line for each preset, with its name and the first sentence of its file."""
    lines = []
    for name, file in presets().items():
        comment = takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
        sentence = " ".join(line.strip("# ") for line in comment).partition(". ")[0]
        lines.append(f"{name:30} {sentence.removesuffix('.')}")
    return lines
