"""FedJudge's figures: 3, and 4 and 5."""

from collections.abc import Sequence

from bench.markdown import escaped, shortened, table
from bench.paper.cells import LegalMethod, Result, Results
from bench.paper.curves import Panel, curves
from bench.paper.fedjudge_cells import cells_of, cells_of_answers
from bench.paper.legal import ASKED, CLIENTS, METRICS, MODELS
from bench.paper.sizes import Size
from bench.paper.tables import Document, Table, Value

_MAX_CHARACTERS = 400  # of an answer


def figure3(size: Size, results: Results) -> Document:
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
        "Each client's personalised model on the client's rows. Bands are standard deviations. In "
        "the paper, CL-Client is almost always above Base-Client.\n"
    )
    return Document(
        [Table("The values of the figure, in percent", columns, rows)],
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


def figures4and5(size: Size, results: Results) -> Document:
    """Return figures 4 and 5: answers side by side."""
    found = {
        name: result
        for cell in cells_of_answers(size)
        if (result := results.get(cell)) is not None
        for name in MODELS[cell.method]
    }
    if not found:
        return Document()
    parts = [
        "The questions are not from the data sets, because their licences are unclear. Answers end "
        f"after {size.fedjudge.new_tokens} tokens.\n",
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
    return escaped(shortened(" ".join(text.split()), _MAX_CHARACTERS))
