"""Train on a task by one of FL-GLM's schedules or centralised, and score the model."""

import functools
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.paper.cells import Result, TaskCell
from bench.paper.sizes import Size, TaskTraining
from bench.paper.sources import Sources
from bench.paper.task_data import TaskData, write_task
from bench.paper.task_settings import run_values, training_of
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import State, attach_adapter, load_adapter
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_base_model, load_tokenizer, locate
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.tasks.scoring import Answers, answer, majority_class, score_answers
from tests.in_process import MemoryJournal, run_in_process

# Of padded tokens, prefixes and answers included.
_MAX_TOKENS = 8192


def measure(cell: TaskCell, size: Size, sources: Sources) -> Result:
    """Train, and score the global model.

    Returns:
        ``loss`` of the right answers in nats per token, the task's ``metrics`` and those of the
        most frequent answer as ``majority``, and the numbers of ``questions`` and of rows that were
        chosen from as ``training_rows``. After training also the losses of the first and the last
        round, means over clients, as ``training_loss``, the number of ``rows`` trained on, and, if
        the cell has one, the ``curve``: rows and metrics after all periods but the last.

    """
    training = training_of(cell.task, size)
    name = sources.model(cell.model)
    model_settings = ModelSettings(name=name, dtype=size.fl_glm.dtype)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = write_task(
            task_name=cell.task,
            parts=sources.parts(cell.task),
            model=locate(name),
            training=training,
            clients=cell.clients,
            folder=folder,
        )
        tokenizer = load_tokenizer(locate(name))
        questions = data.prepared.questions
        result: Result = {
            "questions": len(questions),
            "training_rows": data.training_rows,
            "majority": majority_class(data.prepared.task, questions),
        }
        if cell.method == "bare":
            scorer = Scorer(_model(model_settings, None), tokenizer, data, training)
            return result | scorer.scores()
        values = run_values(cell, size, name, folder)
        journal = run_in_process(
            values,
            state_path=folder / "state",
            clients=cell.clients,
            together=cell.method == "client-batch",
        )
        adapter = parse_run_config(values).adapter
        scorer = Scorer(_model(model_settings, adapter), tokenizer, data, training)
        last, rows = max(journal.adapters), cell.period * training.rows * cell.clients
        if cell.curve:
            result["curve"] = [
                [rows * number, scorer.metrics(journal.adapters[number])]
                for number in range(1, last)
            ]
        result |= {
            "rows": rows * last,
            "training_loss": [_training_loss(journal, 1), _training_loss(journal, last)],
        }
        return result | scorer.scores(journal.adapters[last])


class Scorer:
    """Scores a model on a task's held-out questions.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        data: The questions.
        training: Lengths.

    """

    def __init__(
        self, model: WholeModel, tokenizer: Any, data: TaskData, training: TaskTraining
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._data = data
        self._training = training

    def scores(self, adapter: State | None = None) -> Result:
        """Answer the questions, and measure the loss of the right answers.

        Args:
            adapter: The adapter to use from now on; None for the one in use.

        Returns:
            The task's ``metrics``, and the ``loss`` in nats per token.

        """
        answers = self._answers(adapter, with_loss=True)
        loss = self._loss_of_texts() if answers.loss is None else answers.loss
        return {"metrics": self._scored(answers), "loss": loss}

    def metrics(self, adapter: State) -> dict[str, float]:
        """Answer the questions with an adapter, which is used from now on; return the metrics."""
        return self._scored(self._answers(adapter, with_loss=False))

    def _answers(self, adapter: State | None, with_loss: bool) -> Answers:
        if adapter is not None:
            load_adapter(self._model.peft_model, adapter)
        return answer(
            model=self._model,
            tokenizer=self._tokenizer,
            prepared=self._data.prepared,
            max_tokens=_MAX_TOKENS,
            new_tokens=self._training.new_tokens,
            with_loss=with_loss,
        )

    def _scored(self, answers: Answers) -> dict[str, float]:
        prepared = self._data.prepared
        return score_answers(prepared.task, prepared.questions, answers)

    def _loss_of_texts(self) -> float:
        padding = self._tokenizer.pad_token_id
        batch = self._training.micro_batch
        return held_out_loss(self._model, self._data.held_out, padding, batch).loss


# Most cells after each other have the same.
@functools.lru_cache(maxsize=1)
def _model(settings: ModelSettings, adapter: AdapterSettings | None) -> WholeModel:
    base = load_base_model(settings)
    if adapter is None:
        return WholeModel(base.model)
    return WholeModel(attach_adapter(base.model, adapter, base.reference))


def _training_loss(journal: MemoryJournal, number: int) -> float:
    losses = [
        event["loss"]
        for event in journal.events
        if event["event"] == "train" and event["round"] == number
    ]
    return float(statistics.mean(losses))
