"""``chambers sheet read``: print the results of a human evaluation from filled-in sheets."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.sources import argument


@dataclass(frozen=True, kw_only=True)
class Read:
    """Print a table of the mean scores of each model and the agreement between annotators.

    \b
      chambers sheet read study/key.json annotator-1.csv annotator-2.csv annotator-3.csv

    Each sheet is a filled-in table, or the file that the HTML page saved. Sheets that are
    incomplete or don't match the key are refused. Means are given with the half-width of their 95 %
    confidence interval over questions; the agreement is Krippendorff's alpha with the interval
    metric.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    key: Annotated[Path, argument("KEY.json")]
    sheets: Annotated[list[Path], argument("SHEET.csv…")]

    def __call__(self) -> int:
        """Print the table."""
        missing = [name for name in ("nltk", "scipy") if find_spec(name) is None]
        if missing:
            raise CommandError(
                f"the table needs {' and '.join(missing)}: pip install 'chambers[sheet]'"
            )
        from chambers.sheet.blinding import read_key
        from chambers.sheet.results import evaluate

        key = read_key(self.key)
        results = evaluate(key, self.sheets)
        made = len({row.annotator for row in key.rows.values()})
        print(results.to_markdown())
        print(f"\n{results.questions} questions, {results.annotators} of {made} annotators")
        return 0
