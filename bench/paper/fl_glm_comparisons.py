"""FL-GLM's comparisons with centralised training: tables 1, 2, 5 and 6."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.paper import fl_glm_cells as cells
from bench.paper.cells import Results, TaskCell
from bench.paper.fl_glm_values import (
    BARE,
    MAIN,
    MAJORITY,
    NAMES,
    ROUGE,
    base_model,
    loss,
    losses_lowered,
    metrics,
    percent,
    rows_and_questions,
    with_clients,
)
from bench.paper.published import Published, published
from bench.paper.sizes import Size
from bench.paper.tables import Document, Table, Value

# Columns of a table by name, with task and metric; rows by label, each task's cells.
_Columns = Mapping[str, tuple[str, str]]
_Rows = Mapping[str, Mapping[str, Sequence[TaskCell]]]

# Columns of tables 1 and 5, by task: names in the papers, and metrics.
_ACCURACY = {"accuracy": "accuracy"}
_METRICS: Mapping[str, Mapping[str, str]] = {
    "cb": {"F1": "f1", "accuracy": "accuracy"},
    "multirc": {"F1a": "f1a", "EM": "em"},
    "record": {"F1": "f1", "accuracy": "em"},
}
_CENTRALISED, _SPLIT = "centralised", "FL-GLM, serial"
_SIDES = ("whole", "split")
_CHINESE = "Llama2-Chinese-7B-Chat"
_SUMMARIES = {"cnn-dailymail": "CNN/DailyMail", "xsum": "XSum"}


def table1(size: Size, results: Results) -> Document:
    """Return SuperGLUE's scores with P-tuning v2, and the held-out losses."""
    paper, tasks = published("fl-glm-table1"), size.fl_glm.tasks
    known = {_CENTRALISED: "ChatGLM-6B", _SPLIT: "FL-GLM"}
    columns = _score_columns(tasks)
    literature = [row for row in paper.rows if row not in known.values()]
    rows = [
        *_quoted(paper, literature, list(columns)),
        *_scores(
            results,
            columns=columns,
            rows=_compared(size, tasks, size.models.english, "prefix"),
            paper=paper,
            known=known,
        ),
    ]
    title = f"SuperGLUE, {with_clients(size)}, P-tuning v2"
    notes = [
        base_model(size.models.english),
        "The paper's values in the last rows are those of ChatGLM-6B.",
        paper.note,
    ]
    more = _losses_and_rows(size, results, tasks, size.models.english, "prefix")
    return Document([Table(title, ["", *columns], rows, notes), *more])


def table2(size: Size, results: Results) -> Document:
    """Return ROUGE of summaries."""
    paper = published("fl-glm-table2")
    columns = {
        f"{name} {metric}": (task, key)
        for task, name in _SUMMARIES.items()
        for metric, key in ROUGE.items()
    }
    known = {_CENTRALISED: "ChatGLM-6B", _SPLIT: "FL-GLM"}
    reason = "" if size.fl_glm.summaries else "no data at this size; see `--medium` and `--full`"
    literature = [row for row in paper.rows if row not in known.values()]
    rows = [
        *_quoted(paper, literature, list(columns)),
        *_scores(
            results,
            columns=columns,
            rows=_compared(size, list(_SUMMARIES), size.models.english, "prefix"),
            paper=paper,
            known=known,
            reason=reason,
        ),
    ]
    notes = [base_model(size.models.english), paper.note]
    return Document([Table("Summaries, P-tuning v2", ["", *columns], rows, notes)])


def table5(size: Size, results: Results) -> Document:
    """Return SuperGLUE's accuracies with LoRA on a chat model, and the held-out losses."""
    paper, tasks = published("fl-glm-table5"), size.fl_glm.tasks
    columns = {
        name: value for name, value in _score_columns(tasks).items() if name in paper.columns
    }
    rows = _scores(
        results,
        columns=columns,
        rows=_compared(size, tasks, size.models.chat, "lora"),
        paper=paper,
        known={_CENTRALISED: "centralised", _SPLIT: "split, serial"},
    )
    title = f"SuperGLUE with a chat model, {with_clients(size)}, LoRA"
    more = _losses_and_rows(size, results, tasks, size.models.chat, "lora")
    notes = [f"{base_model(size.models.chat)} The paper's is Llama2-7B-Chat."]
    return Document([Table(title, ["", *columns], rows, notes), *more])


def table6(size: Size, results: Results) -> Document:
    """Return BLEU and ROUGE of medical answers, and the held-out losses."""
    paper, model = published("fl-glm-table6"), size.models.chinese
    columns = {name: ("huatuo", key) for name, key in {"BLEU-4": "bleu4", **ROUGE}.items()}
    rows = [
        *_quoted(paper, ["ChatGLM-6B", "FL-GLM"], list(columns)),
        *_scores(
            results,
            columns=columns,
            rows=_compared(size, ["huatuo"], model, "lora"),
            paper=paper,
            known={_CENTRALISED: _CHINESE, _SPLIT: "FL-Chinese-Llama"},
        ),
    ]
    title = f"Huatuo-26M, sampled, {with_clients(size)}, LoRA"
    more = _losses_and_rows(size, results, ["huatuo"], model, "lora")
    notes = [f"{base_model(model)} The paper's values beside ours are those of {_CHINESE}."]
    return Document([Table(title, ["", *columns], rows, notes), *more])


def split_scores(size: Size, results: Results) -> Document:
    """Return a split model's scores and losses beside the whole model's."""
    found = {cell.task: results.get(cell) for cell in cells.split_scores(size)}
    rows = [
        ([NAMES[task], label], _split_values(task, result["models"][name]))
        for task, result in found.items()
        if result is not None
        for name, label in (("base", "bare base model"), ("tuned", "LoRA with random weights"))
    ]
    if not rows:
        return Document()
    columns = [
        *("task", "model"),
        *(f"score, {side}" for side in _SIDES),
        *(f"held-out loss, {side}" for side in _SIDES),
        "other answers",
        "largest difference of a probability",
    ]
    counts = ", ".join(f"{r['questions']} of {NAMES[task]}" for task, r in found.items() if r)
    notes = [
        base_model(size.models.english),
        f"Questions: {counts}. The split model has one block at each end and a float32 wire.",
    ]
    return Document([Table("The whole model and the split one", columns, rows, notes)])


def _split_values(task: str, own: Mapping[str, Any]) -> list[Value]:
    metric = MAIN.get(task, "accuracy")
    return [
        *(Value([100 * own[side][metric]]) for side in _SIDES),
        *(Value([own[side]["loss"]], digits=6) for side in _SIDES),
        Value([own["other answers"]], digits=0),
        Value([own["difference"]], digits=7),
    ]


def _compared(size: Size, tasks: Sequence[str], model: str, adapter: str) -> _Rows:
    return {
        BARE: {task: [cells.bare(task, model)] for task in tasks},
        _CENTRALISED: {task: cells.centralised(size, task, model, adapter) for task in tasks},
        _SPLIT: {task: cells.split(size, task, model=model, adapter=adapter) for task in tasks},
    }


def _score_columns(tasks: Sequence[str]) -> _Columns:
    return {
        f"{NAMES[task]} {name}": (task, key)
        for task in tasks
        for name, key in _METRICS.get(task, _ACCURACY).items()
    }


def _scores(
    results: Results,
    columns: _Columns,
    rows: _Rows,
    paper: Published,
    known: Mapping[str, str],
    reason: str = "",
) -> list[tuple[list[str], list[Value]]]:
    """Return the rows of a comparison.

    Args:
        results: What has been recorded.
        columns: The columns.
        rows: The rows; of the bare model also the most frequent answers are shown.
        paper: The paper's values.
        known: Their rows by own label.
        reason: Why nothing is run, if so.

    """
    found = []
    for label, by_task in rows.items():
        values = []
        for column, (task, metric) in columns.items():
            figure = paper.figure(known[label], column) if label in known else None
            own = percent(metrics(results, by_task[task]), metric)
            values.append(Value(own, figure, "" if own else reason))
        found.append(([label], values))
        if label == BARE:
            majority = []
            for task, metric in columns.values():
                of_bare = results.of_seeds(by_task[task])
                own = percent([result["majority"] for result in of_bare], metric)
                majority.append(Value(own, quoted=True))
            if any(value.own for value in majority):
                found.append(([MAJORITY], majority))
    return found


def _losses_and_rows(
    size: Size, results: Results, tasks: Sequence[str], model: str, adapter: str
) -> list[Table]:
    """Return the table of held-out losses of a comparison, and that of its rows."""
    compared = _compared(size, tasks, model, adapter)
    rows = [
        ([label], [Value(loss(results, by_task[task])) for task in tasks])
        for label, by_task in compared.items()
    ]
    trained = [
        cell for label in (_CENTRALISED, _SPLIT) for own in compared[label].values() for cell in own
    ]
    notes = losses_lowered(results, trained)
    columns = ["", *(NAMES[task] for task in tasks)]
    losses = Table("Held-out loss of the answers", columns, rows, notes, digits=3)
    own = {task: [*compared[_CENTRALISED][task], *compared[_SPLIT][task]] for task in tasks}
    return [losses, rows_and_questions(size, results, own, adapter)]


def _quoted(
    paper: Published, rows: Sequence[str], columns: Sequence[str]
) -> list[tuple[list[str], list[Value]]]:
    """Return rows of the literature, which the paper quotes."""
    return [
        ([row], [Value(published=paper.figure(row, column), quoted=True) for column in columns])
        for row in rows
    ]
