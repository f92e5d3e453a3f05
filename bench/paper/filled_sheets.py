"""The scores of a human evaluation (FedJudge section 4.3.3), from filled sheets."""

from hashlib import sha256
from pathlib import Path

from bench.paper.cells import Result
from bench.paper.published import published
from bench.paper.sources import SourceError, Sources
from chambers.errors import CommandError
from chambers.sheet.blinding import CRITERIA, Key, read_key
from chambers.sheet.results import evaluate

_TABLE = "fedjudge-table5"


def digests(sources: Sources) -> list[str]:
    """Return digests of the key and the sheets.

    Raises:
        SourceError: One of them can't be used; the message says why.

    """
    measure(sources)
    return sorted(sha256(file.read_bytes()).hexdigest()[:16] for file in sources.sheets)


def measure(sources: Sources) -> Result:
    """Return the number of annotators and questions, the means by model, and the agreement.

    Raises:
        SourceError: The key or a sheet can't be used; the message says why.

    """
    if len(sources.sheets) < 2:
        raise SourceError("--sheets needs key.json and the sheets that annotators have filled in")
    try:
        results = evaluate(_key(sources.sheets[0]), sources.sheets[1:])
    except CommandError as error:
        raise SourceError(f"--sheets: {error}") from error
    return {
        "annotators": results.annotators,
        "questions": results.questions,
        "means": {
            model: {name: means[name].value for name in CRITERIA}
            for model, means in results.means.items()
        },
        "half_widths": {
            model: {name: means[name].half_width for name in CRITERIA}
            for model, means in results.means.items()
        },
        "agreement": dict(results.agreement),
    }


def _key(file: Path) -> Key:
    """Read the key, and check that the models have names of the paper's table."""
    key = read_key(file)
    known = published(_TABLE).rows
    new = [model for model in key.models if model not in known]
    if new:
        raise CommandError(
            f"{file} is about {', '.join(new)}; the table has {', '.join(known)}, by these names "
            "in `chambers sheet make`"
        )
    return key
