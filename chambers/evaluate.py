"""``chambers evaluate``: score whole or split models on tasks."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError, interrupt_at_end
from chambers.sources import (
    INVITATION,
    AdapterOptions,
    BaseModelOptions,
    argument,
    check_output,
    count,
    global_adapter,
    option,
)
from finetuning.data.files import find_part
from finetuning.data.formats import DataError
from finetuning.evaluation.bertscore import EncoderError, find_encoder
from finetuning.files import write_json
from finetuning.settings import ModelSettings
from finetuning.tasks.question import Question
from finetuning.tasks.reading import read_questions
from finetuning.tasks.tasks import TASKS

if TYPE_CHECKING:
    from chambers.model_source import ModelSource
    from chambers.task_scores import Harness, Scores


@dataclass(frozen=True, kw_only=True)
class Evaluate(BaseModelOptions):
    """Score models on tasks.

    MODEL_OR_RUN is a base model (a Hugging Face id or a folder), the folder of an exported adapter,
    or the folder of a run, whose global adapter is scored. For comparison, the base model and the
    most frequent answer are scored too:

    \b
      chambers evaluate --tasks boolq,cb --data /data/superglue runs/2026-01-31_12-00-00_fl-glm

    With the first and last blocks on this machine, and the middle blocks at a block server:

    \b
      chambers evaluate --tasks cb --data … --invitation court.json runs/…/adapters/global

    The data folder contains a folder for each task, such as BoolQ, with the file to score, such as
    val.jsonl. A table is written to standard output.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    models: Annotated[list[str] | None, argument("[MODEL_OR_RUN]…")] = None
    tasks: Annotated[
        str,
        option(
            f"Tasks, separated by commas: {', '.join(TASKS)}; other names are tasks of "
            "lm-evaluation-harness, which need chambers[lm-eval].",
            "NAMES",
        ),
    ]
    data: Annotated[
        Path | None,
        option("Folder with the tasks' files; unused by tasks of lm-evaluation-harness.", "FOLDER"),
    ] = None
    include: Annotated[
        Path | None, option("Folder with YAML files of more lm-evaluation-harness tasks.", "FOLDER")
    ] = None
    invitation: Annotated[Path | None, INVITATION] = None
    limit: Annotated[
        int | None, count("Score only the first N rows of each file; default: all.")
    ] = None
    batch_tokens: Annotated[
        int, count("Maximum number of padded tokens processed at once; default 8192.")
    ] = 8192
    max_length: Annotated[
        int, count("Truncate prompts of tasks with generated answers to N tokens; default 2048.")
    ] = 2048
    max_new_tokens: Annotated[int, count("Maximum tokens per answer; default 256.")] = 256
    bertscore: Annotated[
        str | None,
        option(
            "Also score generated answers with BERTScore, which uses this encoder; needs "
            "chambers[bertscore].",
            "ID_OR_FOLDER",
        ),
    ] = None
    bertscore_layer: Annotated[
        int | None,
        count("Encoder layer; default: bert-score's recommendation, else the last layer."),
    ] = None
    output: Annotated[Path | None, option("Write the scores to this file.", "F.json")] = None

    def __call__(self) -> int:
        """Score the models."""
        self._check()
        try:
            self._score()
        except EncoderError as error:
            raise CommandError(f"--bertscore: {error}") from error
        return 0

    def _score(self) -> None:
        encoder = None
        if self.bertscore is not None:
            encoder = find_encoder(self.bertscore, self.bertscore_layer)
        named = [self._named(text) for text in self.models or [""]]
        questions = {name: self._questions(name) for name in self._names() if name in TASKS}
        from chambers.models import find_source
        from chambers.task_scores import Scoring, print_scores

        # Delete temporary copies of rows on SIGTERM and SIGHUP, as after Ctrl-C.
        interrupt_at_end()
        with ExitStack() as stack:
            harness = self._harness(stack)
            sources: dict[str, ModelSource] = {}
            for text, options in zip(self.models or [""], named, strict=True):
                source = find_source(options, self.invitation)
                sources.setdefault(_name_of(source.settings, sources), source.bare)
                if source.adapter is not None:
                    sources[text] = source
            scoring = Scoring(
                batch_tokens=self.batch_tokens,
                prompt_tokens=self.max_length,
                new_tokens=self.max_new_tokens,
                rows=self.limit,
                encoder=encoder,
                harness=harness,
            )
            scores: Scores = {}
            try:
                scoring.score(sources, questions, scores)
            finally:
                # Show and write the scores computed so far, even after an interruption.
                if scores:
                    print_scores(scores)
                if scores and self.output:
                    self._write(self.output, sources, scores)

    def _check(self) -> None:
        """Refuse invalid options and missing folders."""
        names = self._names()
        if not names:
            raise CommandError("--tasks names no task")
        others = [name for name in names if name not in TASKS]
        if others and find_spec("lm_eval") is None:
            raise CommandError(
                f"--tasks {self.tasks}: {others[0]} is not one of {', '.join(TASKS)}; tasks of "
                "lm-evaluation-harness need chambers[lm-eval]: pip install 'chambers[lm-eval]'"
            )
        if self.data is None and len(others) < len(names):
            raise CommandError("--data is missing: add --data FOLDER, with the tasks' files")
        for name, folder in (("data", self.data), ("include", self.include)):
            if folder and not folder.is_dir():
                raise CommandError(f"--{name} {folder}: there is no such folder")
        if self.output:
            check_output(self.output)
        if not self.models and not self.invitation and not self.model:
            raise CommandError("no model is named: add the folder of a run, or a base model")

    def _names(self) -> list[str]:
        names = [name.strip() for name in self.tasks.split(",") if name.strip()]
        return [name.lower() if name.lower() in TASKS else name for name in names]

    def _harness(self, stack: ExitStack) -> "Harness | None":
        names = [name for name in self._names() if name not in TASKS]
        if not names:
            return None
        from finetuning.evaluation.harness import load_tasks

        try:
            return names, stack.enter_context(load_tasks(names, self.include))
        except DataError as error:
            near = get_close_matches(names[0], TASKS, n=1)
            hint = f"; did you mean {near[0]}, a task of Chambers?" if near else ""
            raise CommandError(f"--tasks {self.tasks}: {error}{hint}") from error

    def _named(self, text: str) -> AdapterOptions:
        """Return the base model and adapter named by a command-line argument."""
        folder = Path(text).expanduser()
        adapter: Path | None = None
        if text and (folder / "adapter_config.json").is_file():
            adapter = folder
        elif text and (folder / "base-model.json").is_file():
            adapter = global_adapter(folder)
        return self.with_adapter(adapter, self.model if adapter or not text else text)

    def _questions(self, name: str) -> Sequence[Question]:
        assert self.data is not None
        task = TASKS[name]
        folders = sorted(
            f for f in self.data.iterdir() if f.name.lower() in {task.folder.lower(), name}
        )
        folder = folders[0] if folders else self.data
        file = find_part(folder, task.held_out)
        if not file or (not folders and len(self._names()) > 1):
            raise CommandError(
                f"{name}: there is no {self.data / task.folder / task.held_out}.jsonl (nor .json, "
                ".csv or .parquet)"
            )
        questions = read_questions(file, task)
        kept = set(list(dict.fromkeys(question.origin for question in questions))[: self.limit])
        return [question for question in questions if question.origin in kept]

    def _write(self, file: Path, sources: "dict[str, ModelSource]", scores: "Scores") -> None:
        content = {
            "models": {
                name: {
                    "base": source.settings.name,
                    "dtype": source.settings.dtype,
                    "quantization": source.settings.quantization,
                    "adapter": str(source.adapter.directory) if source.adapter else None,
                    "split": source.invitation is not None,
                }
                for name, source in sources.items()
            },
            "tasks": scores,
        }
        write_json(file.resolve(), content)


def _name_of(settings: ModelSettings, sources: "dict[str, ModelSource]") -> str:
    """Return a base model's name, with its precision if the name alone is already taken."""
    other = sources.get(settings.name)
    if other is None or other.settings == settings:
        return settings.name
    return f"{settings.name} ({settings.dtype}, quantization {settings.quantization})"
