"""``chambers sheet``: make blinded sheets from models' answers, and evaluate the filled-in ones."""

import random
import secrets
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.sources import argument, check_new_folder, count, option


@dataclass(frozen=True, kw_only=True)
class Make:
    """Make blinded sheets for annotators to score the answers of several models.

    \b
      chambers sheet make FedJudge-Base=base.jsonl FedJudge-CL=cl.jsonl --output study

    Each argument names a model and a file with its answers. A row is an object with "question" and
    "answer", and optionally "reference" and "id", or a row written by chambers generate --output.
    All files must have the same questions.

    The output folder gets two versions of each sheet: sheets/annotator-1.csv for spreadsheets, and
    sheets/annotator-1.html for browsers, which needs no network. Each annotator sees a different
    order of questions and answers. key.json maps answers to models: keep the file secret.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    answers: Annotated[list[str], argument("MODEL=FILE.jsonl…")]
    output: Annotated[Path, option("New folder to write to.", "FOLDER")]
    annotators: Annotated[int, count("Number of sheets; default 3, as in FedJudge.")] = 3
    questions: Annotated[
        int, count("Number of questions, drawn at random; default 100 or, if fewer, all.")
    ] = 100
    hide_references: Annotated[bool, option("Leave out the expected answers.")] = False
    seed: Annotated[
        int | None,
        option(
            "Seed of the random draw and orders. Keep it secret: it reveals which model gave "
            "which answer. Default: random.",
            "N",
        ),
    ] = None

    def __call__(self) -> int:
        """Create the sheets."""
        folder = self.output
        check_new_folder(folder)
        from chambers.sheet.answers import read_answers
        from chambers.sheet.blinding import blind, to_page, to_table
        from finetuning.files import replacing, write_secret

        files = self._files()
        questions = read_answers(files)
        seed = secrets.randbits(64) if self.seed is None else self.seed
        drawn = random.Random(seed).sample(questions, min(self.questions, len(questions)))
        if self.hide_references:
            drawn = [replace(question, reference="") for question in drawn]
        for model in files:
            named = sum(any(model in a for a in q.answers.values()) for q in drawn)
            if named:
                print(f"answers to {named} questions contain the name {model}", file=sys.stderr)
        sheets, key = blind(
            questions=drawn, models=list(files), annotators=self.annotators, seed=seed
        )
        with replacing(folder) as aside:
            (aside / "sheets").mkdir(parents=True)
            for annotator, sheet in sheets.items():
                file = aside / "sheets" / f"annotator-{annotator}"
                file.with_suffix(".html").write_text(to_page(annotator, sheet), encoding="utf-8")
                # Excel requires a byte order mark to detect UTF-8.
                table = file.with_suffix(".csv")
                table.write_text(to_table(sheet), encoding="utf-8-sig", newline="")
            write_secret(aside / "key.json", key.model_dump_json(indent=1).encode())
        print(f"{folder / 'sheets'}: {len(sheets)} sheets of {len(drawn)} questions, to hand out")
        print(f"{folder / 'key.json'}: keep it secret; when the sheets are filled in:")
        print(f"  chambers sheet read {folder / 'key.json'} SHEET.csv …")
        return 0

    def _files(self) -> dict[str, Path]:
        files: dict[str, Path] = {}
        for text in self.answers:
            model, _, file = text.partition("=")
            model = model.strip()
            if not model or not file:
                raise CommandError(f"{text}: must be MODEL=FILE.jsonl")
            if model in files:
                raise CommandError(f"{model} is named twice")
            files[model] = Path(file).expanduser()
        return files


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
        if find_spec("nltk") is None:
            raise CommandError("the table needs nltk: pip install 'chambers[sheet]'")
        from chambers.sheet.blinding import read_sheet_key
        from chambers.sheet.results import evaluate_sheets

        key = read_sheet_key(self.key)
        results = evaluate_sheets(key, self.sheets)
        made = len({row.annotator for row in key.rows.values()})
        print(results.to_markdown())
        print(f"\n{results.questions} questions, {results.annotators} of {made} annotators")
        return 0
