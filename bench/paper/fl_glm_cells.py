"""Which cells FL-GLM's tables and figures have at a size.

Tables share cells: serial training with two clients at the first period is in tables 1, 5 and 8 and
in figures 5 and 6, where adapter and model are the same.
"""

from collections.abc import Sequence
from dataclasses import replace

from bench.paper.cells import AttackCell, Cell, Method, SplitCell, TaskCell, TimeCell
from bench.paper.sizes import Size
from bench.paper.task_settings import training_of

SCHEDULES: tuple[Method, ...] = ("serial", "client-batch", "hierarchical")
# The task of figure 5.
DIVIDED = "copa"
# Head blocks and decoder of table 4, by the row in the paper.
ATTACKS = {
    "embedding alone, linear decoder": (0, "linear"),
    "one block, Transformer decoder": (1, "transformer"),
}


def bare(task: str, model: str) -> TaskCell:
    """Return the cell of the base model without training."""
    return TaskCell(task=task, model=model, method="bare")


def centralised(size: Size, task: str, model: str, adapter: str) -> list[TaskCell]:
    """Return the cells of centralised training, one per seed."""
    cell = TaskCell(
        task=task,
        model=model,
        method="centralised",
        adapter=adapter,  # type: ignore[arg-type]
        clients=1,
        period=training_of(task, size).steps,
    )
    return _by_seed(size, cell)


def split(
    size: Size,
    task: str,
    method: Method = "serial",
    *,
    model: str = "",
    adapter: str = "",
    clients: int = 0,
    period: int = 0,
    by_label: bool = False,
) -> list[TaskCell]:
    """Return the cells of a schedule, one per seed.

    Args:
        size: The size.
        task: The task.
        method: The schedule.
        model: The base model; empty for that of most tables.
        adapter: Kind of adapter; empty for that of table 8.
        clients: Number of clients; 0 for that of most tables.
        period: Averaging period; 0 for that of most tables.
        by_label: Whether the rows are divided by their labels.

    """
    own = size.fl_glm
    period, adapter = period or own.periods[0], adapter or own.period_adapter
    cell = TaskCell(
        task=task,
        model=model or size.models.english,
        method=method,
        adapter=adapter,  # type: ignore[arg-type]
        clients=clients or own.clients[0],
        period=period,
        partition="label" if by_label else "iid",
        curve=task in {*own.curves, DIVIDED}
        and (period, adapter) == (own.periods[0], own.period_adapter),
    )
    return _by_seed(size, cell)


def table1(size: Size) -> list[Cell]:
    """Return the cells of table 1."""
    return _compared(size, size.fl_glm.tasks, size.models.english, "prefix")


def table2(size: Size) -> list[Cell]:
    """Return the cells of table 2."""
    return _compared(size, size.fl_glm.summaries, size.models.english, "prefix")


def table3(size: Size) -> list[Cell]:
    """Return the cells of table 3; one repetition of all after another."""
    rows = timed(size).values()
    return [
        replace(cell, seed=number)
        for number in range(size.fl_glm.time.repetitions)
        for cell in rows
    ]


def timed(size: Size) -> dict[str, TimeCell]:
    """Return the first repetition of each row of table 3, by the row in the paper."""
    own = size.fl_glm.time
    cells = [
        TimeCell("centralised", 1),
        TimeCell("serial", 2),
        *(TimeCell("client-batch", clients) for clients in own.client_batch),
        *(TimeCell("hierarchical", clients) for clients in own.hierarchical),
    ]
    return {
        cell.method if cell.clients == 1 else f"{cell.method}, {cell.clients} clients": cell
        for cell in cells
    }


def table4(size: Size) -> list[Cell]:
    """Return the cells of table 4."""
    return [cell for row in ATTACKS for cell in attacks(size, row)]


def attacks(size: Size, row: str) -> list[AttackCell]:
    """Return the cells of a row of table 4, one per seed."""
    head_blocks, decoder = ATTACKS[row]
    return [
        AttackCell(
            model=size.models.english,
            decoder=decoder,  # type: ignore[arg-type]
            head_blocks=head_blocks,
            seed=seed,
        )
        for seed in range(size.seeds)
    ]


def table5(size: Size) -> list[Cell]:
    """Return the cells of table 5."""
    return _compared(size, size.fl_glm.tasks, size.models.chat, "lora")


def table6(size: Size) -> list[Cell]:
    """Return the cells of table 6."""
    return _compared(size, ["huatuo"], size.models.chinese, "lora")


def table8(size: Size) -> list[Cell]:
    """Return the cells of table 8."""
    cells: list[Cell] = []
    for task in size.fl_glm.period_tasks:
        cells.append(bare(task, size.models.english))
        for period in size.fl_glm.periods:
            for method in SCHEDULES:
                cells += split(size, task, method, period=period)
    return cells


def figure5(size: Size) -> list[Cell]:
    """Return the cells of figure 5."""
    cells: list[Cell] = [bare(DIVIDED, size.models.english)]
    for method in SCHEDULES:
        for by_label in (False, True):
            cells += split(size, DIVIDED, method, by_label=by_label)
    return cells


def figures6to8(size: Size) -> list[Cell]:
    """Return the cells of figures 6 to 8."""
    cells: list[Cell] = []
    for task in size.fl_glm.curves:
        cells.append(bare(task, size.models.english))
        for method in SCHEDULES:
            for clients in size.fl_glm.clients:
                cells += split(size, task, method, clients=clients)
    return cells


def split_scores(size: Size) -> list[SplitCell]:
    """Return the cells that compare a split model with the whole one, if the size is in float32."""
    tasks = size.fl_glm.period_tasks if size.fl_glm.dtype == "float32" else ()
    return [SplitCell(task, size.models.english) for task in tasks]


def _compared(size: Size, tasks: Sequence[str], model: str, adapter: str) -> list[Cell]:
    """Return the cells of a comparison of bare, centralised and serial training."""
    cells: list[Cell] = []
    for task in tasks:
        cells.append(bare(task, model))
        cells += centralised(size, task, model, adapter)
        cells += split(size, task, model=model, adapter=adapter)
    return cells


def _by_seed(size: Size, cell: TaskCell) -> list[TaskCell]:
    return [replace(cell, seed=seed) for seed in range(size.seeds)]
