"""The tables and figures of FedJudge: their cells, and rows made of results."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from bench.continual_table import paired_interval
from bench.markdown import escaped, shortened, table
from bench.paper.artefact import Artefact
from bench.paper.cells import LegalCell, LegalMethod, Result, Results, SheetsCell
from bench.paper.curves import Panel, curves
from bench.paper.legal import ASKED, CLIENTS, COUNTED, METRICS, MODELS
from bench.paper.published import published
from bench.paper.sizes import Size
from bench.paper.tables import Document, Table, Value

_ABOUT = {
    "court": "Court view generation (Client1; the paper's table 2)",
    "consultation": "Legal consultation (Client2; the paper's table 2)",
    "reasoning": "Legal reasoning (Client3; the paper's table 3)",
}
_PUBLISHED = {
    "court": "fedjudge-table2",
    "consultation": "fedjudge-table2",
    "reasoning": "fedjudge-table3",
}
_MOST_CHARACTERS = 400  # of an answer in a figure


def cells_of(size: Size, method: LegalMethod) -> list[LegalCell]:
    """Return a method's cells, one for each seed; the bare model has no seed."""
    cell = LegalCell(size.models.legal, method)
    return [replace(cell, seed=seed) for seed in range(1 if method == "bare" else size.seeds)]


def _all_cells(size: Size) -> list[LegalCell]:
    return [cell for method in get_args(LegalMethod) for cell in cells_of(size, method)]


def _cells_of_strategies(size: Size) -> list[LegalCell]:
    return [*cells_of(size, "fedjudge-base"), *cells_of(size, "fedjudge-cl")]


def _cells_of_answers(size: Size) -> list[LegalCell]:
    return [cells_of(size, method)[0] for method in ("bare", "center", "fedjudge-cl")]


def _tables(size: Size, results: Results) -> Document:
    """Return tables 2 and 3: a table for each client's rows."""
    found = {method: results.of_seeds(cells_of(size, method)) for method in MODELS}
    if not any(found.values()):
        return Document()
    rows = [(name, found[method]) for method, names in MODELS.items() for name in names]
    tables = [
        Table(
            title=_ABOUT[client],
            columns=("", *METRICS, "held-out loss"),
            rows=[((name,), _values(name, own, client)) for name, own in rows],
        )
        for client in CLIENTS
    ]
    notes = [
        _about_training(size),
        published("fedjudge-table2").note,
        _about_rows(size, next(own[0] for own in reversed(found.values()) if own)),
        *_about_penalty(size, found["fedjudge-cl"]),
    ]
    difference = _difference(found["fedjudge-cl"], found["fedjudge-base"])
    return Document(tables=tables, text="".join(f"{note}\n\n" for note in [*notes, *difference]))


def _values(name: str, found: Sequence[Result], client: str) -> list[Value]:
    """Return a model's scores on a client's rows in percent, and its loss."""
    scores = [result["scores"][name][client] for result in found]
    source = published(_PUBLISHED[client])
    values = [
        Value(
            own=[100 * own[key] for own in scores if key in own],
            published=source.figure(name, f"{client} {metric}"),
        )
        for metric, key in METRICS.items()
    ]
    return [*values, Value([own["loss"] for own in scores], digits=3)]


def _about_training(size: Size) -> str:
    """Return what the tables compare."""
    own = size.fedjudge
    rows = own.batch_size * own.accumulation
    steps, seen, more = f"an epoch in steps of {rows} rows", "", ""
    if own.local_steps:
        steps = f"{own.local_steps} steps of {rows} rows"
        seen = f", which makes {own.rounds * own.local_steps * rows} rows"
        more = f", and takes {len(CLIENTS)} times as many steps"
    encoder = f"{own.encoder}, layer {own.encoder_layer}" if own.encoder else "not run"
    return (
        f"{_model(size)}. A client trains {steps} in each of {own.rounds} rounds{seen}; Center "
        f"has the rows of all clients{more}. Center keeps its optimizer state for all steps; a "
        "strategy's clients reset theirs in each round. Every model answers the same questions in "
        f"at most {own.new_tokens} tokens; deviations are those between seeds, and say nothing "
        "about other questions. "
        f"BERTScore: {encoder}, not rescaled; the paper doesn't name its encoder."
    )


def _model(size: Size) -> str:
    """Return the base model in words."""
    name = size.models.legal
    return name if name.endswith("/Baichuan-7B") else f"{name} in place of Baichuan-7B"


def _about_rows(size: Size, result: Result) -> str:
    """Return how many rows were used, and how many were left out because they don't fit."""
    own, rows = size.fedjudge, []
    for client, counts in result["rows"].items():
        shown = (
            f"{used} ({fitting} of {there} fit)"
            for there, fitting, used in (counts[name] for name in COUNTED)
        )
        rows.append((client, *shown))
    about = (
        f"Rows of more than {own.max_length} tokens are neither trained on nor measured by their "
        f"loss, questions of more than {own.prompt_length} are not answered, and none is shortened:"
    )
    heads = ("", "rows to train on", "questions answered", "rows measured by their loss")
    return "\n".join([f"{about}\n", *table(heads, rows)])


def _about_penalty(size: Size, found: Sequence[Result]) -> list[str]:
    if not found:
        return []
    share = statistics.mean(result["penalty_share"] for result in found)
    return [
        f"FedJudge-CL has λ = {size.fedjudge.weight:g}, with which the penalty was "
        f"{100 * share:.0f} % of the gradient norm."
    ]


def _difference(own: Sequence[Result], base: Sequence[Result]) -> list[str]:
    """Return FedJudge-CL's difference from FedJudge-Base, in pairs of seeds."""
    if len(own) < 2 or len(base) < 2:
        return []
    parts = []
    for kind, numbers in (("global", (0, 0, 0)), ("own personalised", (1, 2, 3))):
        pairs = [
            _mean_loss(one, "fedjudge-cl", numbers) - _mean_loss(other, "fedjudge-base", numbers)
            for one, other in zip(own, base, strict=True)
        ]
        mean, low, high = paired_interval(pairs)
        parts.append(f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] with the {kind} model")
    return [
        "FedJudge-CL − FedJudge-Base, held-out loss over the three clients, paired by seed, with "
        f"the 95 % interval: {'; '.join(parts)}."
    ]


def _mean_loss(result: Result, method: LegalMethod, numbers: Sequence[int]) -> float:
    """Return the mean over the clients of one model's loss each; 0 is the global model."""
    losses = [
        float(result["scores"][MODELS[method][number]][client]["loss"])
        for number, client in zip(numbers, CLIENTS, strict=True)
    ]
    return statistics.mean(losses)


def _training_process(size: Size, results: Results) -> Document:
    """Return figure 3: scores of the personalised models round by round."""
    methods: dict[str, LegalMethod] = {
        "Base-Client": "fedjudge-base",
        "CL-Client": "fedjudge-cl",
    }
    found = {line: results.of_seeds(cells_of(size, method)) for line, method in methods.items()}
    found = {line: own for line, own in found.items() if own}
    if not found:
        return Document()
    drawn = {
        metric: {
            client: {line: _by_round(own, client, metric) for line, own in found.items()}
            for client in CLIENTS
        }
        for metric in ("R-L", "B-N", "Bert-S")
    }
    drawn = {
        metric: clients
        for metric, clients in drawn.items()
        if all(points for lines in clients.values() for points in lines.values())
    }
    names = {client: f"{client} (Client{number})" for number, client in enumerate(CLIENTS, start=1)}
    panels = [
        (f"{metric}, %", [Panel(names[client], lines) for client, lines in clients.items()])
        for metric, clients in drawn.items()
    ]
    rows = [
        ((names[client], line, metric), [Value(scores) for _, scores in points])
        for metric, clients in drawn.items()
        for client, lines in clients.items()
        for line, points in lines.items()
    ]
    columns = (
        "client",
        "model",
        "score",
        *(f"round {number}" for number in range(1, size.fedjudge.rounds + 1)),
    )
    text = (
        "Each client's personalised model on the client's own rows, after each round. No penalty "
        "applies in the first round. Bands are standard deviations over seeds. The paper gives no "
        "numbers for this figure; it finds CL-Client almost always above Base-Client.\n"
    )
    return Document(
        [Table("The values of the figure", columns, rows)],
        {"fedjudge-figure3": curves(panels, "round")},
        text,
    )


def _by_round(
    found: Sequence[Result], client: str, metric: str
) -> list[tuple[float, Sequence[float]]]:
    """Return a personalised model's scores on its own rows, in percent, of all seeds by round."""
    rounds = zip(*(result["rounds"][client] for result in found), strict=True)
    key = METRICS[metric]
    return [
        (number, [100 * scores[key] for scores in of_seeds])
        for number, of_seeds in enumerate(rounds, start=1)
        if all(key in scores for scores in of_seeds)
    ]


def _answers(size: Size, results: Results) -> Document:
    """Return figures 4 and 5: answers side by side."""
    found = {
        name: result
        for cell in _cells_of_answers(size)
        if (result := results.get(cell)) is not None
        for name in MODELS[cell.method]
    }
    if not found:
        return Document()
    parts = [
        "The paper shows answers to held-out questions. Rows of these data sets are not shown "
        "here, because it is unclear whether they may be redistributed; the questions are our own. "
        f"Answers are the first seed's, and end after {size.fedjudge.new_tokens} tokens.\n",
    ]
    for figure, (client, question) in enumerate(ASKED.items(), start=4):
        number = CLIENTS.index(client) + 1
        rows = [("question", _shown(question))]
        for name in ("Bare model", "Center", f"CL-Client{number}"):
            text = _shown(found[name]["answers"][name][client]) if name in found else "not run"
            rows.append((f"**{name}**", text or "(empty)"))
        parts += [f"**Figure {figure}: {client} (Client{number})**\n", *table(("", ""), rows)]
    return Document(text="\n".join(parts))


def _shown(text: str) -> str:
    """Return a text on one line of a table."""
    return escaped(shortened(" ".join(text.split()), _MOST_CHARACTERS))


def _human_evaluation(size: Size, results: Results) -> Document:
    """Return table 5: the means of what annotators scored."""
    found, source = results.get(SheetsCell()), published("fedjudge-table5")
    reason = (
        "it needs sheets that annotators have filled in "
        "([human-evaluation.md](human-evaluation.md)); name them with --sheets"
    )
    rows = []
    for name, figures in source.rows.items():
        means = (found or {"means": {}})["means"].get(name, {})
        values = [
            Value([means[c]] if c in means else [], figure, "" if means else reason, digits=2)
            for c, figure in zip(source.columns, figures, strict=True)
        ]
        rows.append(((name,), values))
    notes = []
    if found:
        agreement = ", ".join(
            f"{name} {'–' if alpha is None else f'{alpha:.2f}'}"
            for name, alpha in found["agreement"].items()
        )
        widths = "; ".join(
            f"{name} " + ", ".join("–" if w is None else f"± {w:.2f}" for w in own.values())
            for name, own in found["half_widths"].items()
        )
        notes = [
            f"{found['questions']} questions, {found['annotators']} annotators. Half of the 95 % "
            f"intervals over questions: {widths}. Krippendorff's alpha: {agreement}."
        ]
    columns = ("", *source.columns)
    return Document(tables=[Table("Means of scores from 1 to 5", columns, rows, notes)])


ARTEFACTS = (
    Artefact(
        name="fedjudge-table2",
        title="FedJudge, tables 2 and 3: methods on three legal tasks",
        cells=_all_cells,
        document=_tables,
    ),
    Artefact(
        name="fedjudge-figure3",
        title="FedJudge, figure 3: scores round by round",
        cells=_cells_of_strategies,
        document=_training_process,
    ),
    Artefact(
        name="fedjudge-figures4-5",
        title="FedJudge, figures 4 and 5: answers side by side",
        cells=_cells_of_answers,
        document=_answers,
    ),
    Artefact(
        name="fedjudge-table5",
        title="FedJudge, table 5: human evaluation",
        cells=lambda _: [SheetsCell()],
        document=_human_evaluation,
    ),
)
