"""FedJudge's tables, with rows made of results, and what can be named on the command line."""

import statistics
from collections.abc import Sequence

from bench.continual_table import paired_interval
from bench.markdown import table
from bench.paper import fedjudge_cells as cells
from bench.paper.artefact import Artefact
from bench.paper.cells import LegalMethod, Result, Results, SheetsCell
from bench.paper.fedjudge_figures import figure3, figures4and5
from bench.paper.legal import CLIENTS, COUNTED, METRICS, MODELS
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


def _tables(size: Size, results: Results) -> Document:
    """Return tables 2 and 3: a table for each client's rows."""
    found = {method: results.of_seeds(cells.cells_of(size, method)) for method in MODELS}
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
        f"has the rows of all clients{more}. Answers have at most {own.new_tokens} tokens. "
        f"BERTScore: {encoder}, not rescaled."
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
        f"Rows of more than {own.max_length} tokens and questions of more than "
        f"{own.prompt_length} are left out:"
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
        "FedJudge-CL − FedJudge-Base, held-out loss, paired by seed, with the 95 % interval: "
        f"{'; '.join(parts)}."
    ]


def _mean_loss(result: Result, method: LegalMethod, numbers: Sequence[int]) -> float:
    """Return the mean over the clients of one model's loss each; 0 is the global model."""
    losses = [
        float(result["scores"][MODELS[method][number]][client]["loss"])
        for number, client in zip(numbers, CLIENTS, strict=True)
    ]
    return statistics.mean(losses)


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
        cells=cells.all_cells,
        document=_tables,
    ),
    Artefact(
        name="fedjudge-figure3",
        title="FedJudge, figure 3: scores round by round",
        cells=cells.cells_of_strategies,
        document=figure3,
    ),
    Artefact(
        name="fedjudge-figures4-5",
        title="FedJudge, figures 4 and 5: answers side by side",
        cells=cells.cells_of_answers,
        document=figures4and5,
    ),
    Artefact(
        name="fedjudge-table5",
        title="FedJudge, table 5: human evaluation",
        cells=lambda _: [SheetsCell()],
        document=_human_evaluation,
    ),
)
