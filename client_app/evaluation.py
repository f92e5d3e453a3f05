"""Evaluation of a model on a client's held-out data, for all strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from client_app.task import ClientTask, Metrics
from federation.messages import LARGEST_METRIC, Answer
from finetuning.adapters.adapter import State, save_adapter
from finetuning.adapters.model_card import model_card
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.held_out import held_out_loss
from finetuning.files import write_json
from finetuning.model.locating import reference
from finetuning.whole_model import WholeModel
from split.client.split_model import SplitModel


@dataclass
class EvaluationResult:
    """The results that an evaluate message requests."""

    metrics: Metrics = field(default_factory=dict)  # keyed by ``<model>.<metric>``
    answers: list[Answer] = field(default_factory=list)  # answers to send as text
    importance: State | None = None  # J at the global adapter, if it was requested
    release: dict[str, str] = field(default_factory=dict)  # verdict of the leak test, if any

    def measure(
        self, kind: str, model: WholeModel | SplitModel, tokenizer: Any, task: ClientTask
    ) -> None:
        """Measure a model's held-out loss and, if configured, score its generated answers.

        ``kind`` is one of ``MODELS``. Before the first round and after the last, answers are also
        sent as text if the run config requests this.
        """
        settings, test = task.config.evaluate, task.institution.test
        held_out = held_out_loss(model, test, task.institution.padding, settings.batch_size)
        metrics: Metrics = {
            "loss": held_out.loss,
            "perplexity": min(held_out.perplexity, LARGEST_METRIC),
            "examples": len(test),
            "target-tokens": held_out.target_tokens,
        }
        if settings.generate:
            from finetuning.evaluation.scoring import score

            asked = task.institution.asked
            answers = generate_texts(
                model=model,
                tokenizer=tokenizer,
                prompts=[prompt.tokens for prompt in asked],
                batch_size=settings.batch_size,
                max_new=settings.max_new_tokens,
            )
            metrics |= score(answers, [prompt.reference for prompt in asked])
            if task.instruction.round == 0 or task.instruction.final:
                shown = list(zip(asked, answers, strict=True))[: settings.shown]
                self.answers += [Answer(kind, p.question, p.reference, text) for p, text in shown]
        self.metrics |= {f"{kind}.{name}": value for name, value in metrics.items()}


def save_final_adapters(task: ClientTask, adapters: Mapping[str, State], peft_config: Any) -> None:
    """Save the final adapters for the whole model on the client's disk, in PEFT's format."""
    config, institution = task.config, task.institution
    base = reference(config.model.name, institution.directory)
    # As in a run's results folder:
    write_json(task.state.directory / "config.json", config.flat())
    content = {"loaded from": base, "digests": institution.fingerprint}
    write_json(task.state.directory / "base-model.json", content)
    for kind, adapter in adapters.items():
        card = model_card(
            title=f"{kind.capitalize()} adapter",
            base=config.model.name,
            directory=institution.directory,
            clients=1,
            rounds=config.rounds,
            kind=config.adapter.kind,
            config=config.changed(),
            lineage=task.instruction.lineage,
        )
        folder = task.state.directory / "adapters" / kind
        save_adapter(folder, adapter, peft_config, card, institution.directory)
