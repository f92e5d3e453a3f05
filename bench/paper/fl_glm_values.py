"""What the tables and figures of FL-GLM have in common."""

from collections.abc import Mapping, Sequence

from bench.paper.cells import Cell, Results, TaskCell
from bench.paper.fl_glm_cells import bare
from bench.paper.sizes import Size
from bench.paper.tables import Table, Value
from bench.paper.task_settings import training_of
from finetuning.tasks.tasks import TASKS

NAMES = {
    "boolq": "BoolQ",
    "cb": "CB",
    "copa": "COPA",
    "huatuo": "Huatuo",
    "multirc": "MultiRC",
    "record": "ReCoRD",
    "rte": "RTE",
    "wic": "WiC",
    "wsc": "WSC",
}
# The metric where there is but one column for a task; for others it is accuracy.
MAIN = {"multirc": "f1a", "record": "f1"}
ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
ADAPTERS = {"lora": "LoRA", "prefix": "P-tuning v2"}
BARE, MAJORITY = "bare base model", "most frequent answer"
PAPERS_MODEL = "The paper's model is ChatGLM-6B, with P-tuning v2."
SERVER_STEPS = (
    "All schedules train on as many rows. With K clients, the server takes n / K steps where "
    "serial takes n."
)


def metrics(results: Results, of_seeds: Sequence[Cell]) -> list[dict[str, float]]:
    """Return the task's metrics of cells that differ in their seeds."""
    return [result["metrics"] for result in results.of_seeds(of_seeds)]


def percent(metrics: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return a metric in percent, where there is one."""
    return [100 * each[name] for each in metrics if name in each]


def loss(results: Results, of_seeds: Sequence[Cell]) -> list[float]:
    """Return the held-out losses of cells that differ in their seeds."""
    return [result["loss"] for result in results.of_seeds(of_seeds)]


def losses_lowered(results: Results, trained: Sequence[TaskCell]) -> list[str]:
    """Return a sentence that says in how many cells training has lowered the held-out loss.

    Args:
        results: What has been recorded.
        trained: The cells; those that were not run, or whose bare model wasn't, don't count.

    """
    compared, others = 0, []
    for cell in trained:
        own, base = results.get(cell), results.get(bare(cell.task, cell.model))
        if own is None or base is None:
            continue
        compared += 1
        if own["loss"] >= base["loss"]:
            others.append(
                f"{NAMES[cell.task]}, {cell.method}, period {cell.period}, seed {cell.seed}"
            )
    if not compared:
        return []
    lower = compared - len(others)
    text = f"The held-out loss is lower than the bare model's after {lower} of {compared} trainings"
    return [f"{text}; it is not after: {'; '.join(others)}." if others else f"{text}."]


def base_model(name: str) -> str:
    """Return a sentence with the base model."""
    return f"Base model: {name}."


def with_clients(size: Size) -> str:
    """Return the number of clients of most tables in words."""
    return f"{size.fl_glm.clients[0]} clients"


def rows_and_questions(
    size: Size, results: Results, trained: Mapping[str, Sequence[TaskCell]], adapter: str
) -> Table:
    """Return how many rows and questions a table's scores come from.

    Args:
        size: The size.
        results: What has been recorded.
        trained: Trained cells by task, which have the same rows.
        adapter: Kind of their adapters.

    """
    rows = []
    for task, cells in trained.items():
        training = training_of(task, size)
        found = [result for cell in cells if (result := results.get(cell))][:1]
        values = [
            Value([training.max_length]),
            *(Value([result[key] for result in found]) for key in ("training_rows", "rows")),
            Value([training.rows]),
            Value([result["questions"] for result in found]),
        ]
        rows.append(([NAMES[task]], values))
    longer = "left out" if all(TASKS[task].is_cloze for task in trained) else "shortened"
    notes = [f"Longer rows and questions are {longer}. Adapters: {_adapters(size, adapter)}."]
    columns = [
        "",
        "tokens at most",
        "rows to choose from",
        "trained on",
        "rows of a client's step",
        "questions",
    ]
    return Table("Rows and questions", columns, rows, notes, digits=0)


def _adapters(size: Size, kind: str) -> str:
    if kind == "lora":
        lora = size.fl_glm.lora
        return f"LoRA of rank {lora.rank}, learning rate {lora.learning_rate:g}"
    prefix = size.fl_glm.prefix
    return (
        f"P-tuning v2 with {prefix.prefix_length} trained positions, learning rate "
        f"{prefix.learning_rate:g}"
    )
