"""``chambers leaks``: measure what an adapter gives away about its training rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chambers.errors import CommandError
from chambers.sources import BaseModelOptions, argument, check_output, count, option
from finetuning.files import write_json
from finetuning.settings import DataSettings

if TYPE_CHECKING:
    from finetuning.data.tokenization import Example
    from finetuning.evaluation.leaks import Leaks
    from finetuning.whole_model import WholeModel

_TASK = "Task of the rows (data.task); default: the run's, else none."
_COLUMNS = "Columns of the rows (data.columns); default: the run's, else those known."


def _limit(description: str) -> Any:
    return typer.Option(help=description, metavar="SHARE", show_default=False, min=0.0, max=1.0)


@dataclass(frozen=True, kw_only=True)
class LeakTest(BaseModelOptions):
    """Measure what an adapter gives away about its training rows.

    \b
      chambers leaks adapters/global --data /srv/chambers/data --max-auc 0.6 --max-extracted 0.01

    FOLDER of --data has the training rows, and held-out rows of the same kind on which the adapter
    was not trained. With thresholds, the exit status is 1 if one is exceeded. A pass shows that
    these attacks fail, not that all do: docs/attack.md.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    adapter: Annotated[Path, argument("ADAPTER")]
    data: Annotated[Path, option("Folder with the rows.", "FOLDER")]
    task: Annotated[str | None, option(_TASK, "TASK")] = None
    columns: Annotated[str | None, option(_COLUMNS, "NAME=COLUMN,…")] = None
    rows: Annotated[int, count("Use at most N rows of each kind; default 200.")] = 200
    canary: Annotated[
        list[str] | None,
        option('Canary in the training rows, as "text before|canary"; repeatable.', "TEXT"),
    ] = None
    max_auc: Annotated[float | None, _limit("Largest AUC of the membership test.")] = None
    max_extracted: Annotated[float | None, _limit("Largest share of extracted spans.")] = None
    output: Annotated[Path | None, option("Write the results to this file.", "F.json")] = None

    def __call__(self) -> int:
        """Print a table; return 1 if a threshold is exceeded."""
        if self.output:
            check_output(self.output)
        canaries = [text.rpartition("|")[::2] for text in self.canary or ()]
        if not all(before and canary for before, canary in canaries):
            raise CommandError('--canary must be "text before|canary"')
        options = self.with_adapter(self.adapter, self.model)
        from chambers.models import find_source, load_source
        from chambers.sources import find_run

        source = find_source(options, None)
        run = find_run(source.adapter)
        examples = self._examples(source.directory, dict(run.config) if run else {})
        with load_source(source) as model:
            from finetuning.evaluation.leaks import measure_leaks

            leaks = measure_leaks(model, *examples)  # type: ignore[arg-type]
            exposures = _exposures(model, canaries, source.directory)  # type: ignore[arg-type]
        problems = leaks.exceeded(self.max_auc, self.max_extracted)
        _print(leaks, exposures)
        if self.output:
            facts = {"exposure": exposures, "exceeded": problems}
            write_json(self.output.resolve(), asdict(leaks) | facts)
        for problem in problems:
            print(f"exceeded: {problem}")
        return 1 if problems else 0

    def _examples(
        self, directory: Path, config: dict[str, Any]
    ) -> "tuple[list[Example], list[Example], int]":
        from finetuning.data.files import find_parts
        from finetuning.data.tokenization import tokenize
        from finetuning.model.tokenizer import load_tokenizer
        from finetuning.tasks.reading import held_out_part, read_task_rows

        own = {"task": self.task, "columns": self.columns}
        chosen = {k: v if v is not None else config.get(f"data.{k}", "") for k, v in own.items()}
        settings = DataSettings.model_validate(chosen)
        parts = find_parts(self.data, held_out_part(settings))
        if not parts.held_out:
            raise CommandError(
                f"--data {self.data}: there are no held-out rows (test.jsonl), with which the "
                "training rows must be compared"
            )
        tokenizer = load_tokenizer(directory)
        length = int(config.get("data.max-length", DataSettings().max_length))
        inside, outside = (
            tokenize(read_task_rows(part, settings)[: self.rows], tokenizer, length)[0]
            for part in (parts.train, parts.held_out)
        )
        return inside, outside, tokenizer.pad_token_id


def _exposures(
    model: "WholeModel", canaries: Sequence[tuple[str, str]], directory: Path
) -> dict[str, float]:
    from finetuning.evaluation.leaks import alternatives, exposure
    from finetuning.model.tokenizer import load_tokenizer

    tokenizer, found = load_tokenizer(directory), {}
    for number, (before, canary) in enumerate(canaries, start=1):
        tokens = [
            tokenizer(each, add_special_tokens=False, return_tensors="pt").input_ids[0]
            for each in (before, *alternatives(canary))
        ]
        found[f"canary {number}"] = exposure(model, tokens[0], tokens[1:])
    return found


def _print(leaks: "Leaks", exposures: dict[str, float]) -> None:
    from finetuning.evaluation.leaks import SPAN

    lines = {
        "rows": f"{leaks.members} training rows, {leaks.others} others",
        "membership, AUC": f"{leaks.auc:.3f} ({leaks.auc_low:.3f} to {leaks.auc_high:.3f}; "
        "0.5 is a guess)",
        "recognised at 1 % false positives": f"{100 * leaks.recognised:.1f} %",
        f"extracted spans of {SPAN} tokens": f"{leaks.extracted} of {leaks.spans} training rows, "
        f"{leaks.other_extracted} of {leaks.other_spans} others",
    } | {f"exposure of {name}": f"{bits:.1f} of 10 bits" for name, bits in exposures.items()}
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:{width}}  {value}")
