"""Scores of models on the held-out rows of FedJudge's clients (section 4.2.2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.paper.legal import CLIENTS
from bench.paper.legal_data import legal_rows
from bench.paper.sizes import FedJudge
from bench.paper.sources import SourceError, Sources
from client_app.kept import keep_one
from finetuning.adapters.adapter import State, attach_adapter, load_adapter
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.bertscore import Encoder, EncoderError, bertscore
from finetuning.evaluation.generation import GREEDY, continue_prompts
from finetuning.evaluation.held_out import held_out_loss
from finetuning.evaluation.scoring import score
from finetuning.model.base_model import BaseModelError, load_base_model, locate
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.tasks.scoring import Prepared, answer
from finetuning.tasks.tasks import TASKS

_MAX_TOKENS = 16384  # of prompts and answers that are computed at once


class LegalScoring:
    """Scores a base model with adapters.

    Args:
        model: The base model, as ``model.name``.
        settings: Numbers of rows, lengths of prompts and answers, encoder, and the adapters' form.
        sources: Where the rows and the encoder are.

    """

    def __init__(self, model: str, settings: FedJudge, sources: Sources) -> None:
        self._settings = settings
        self._encoder = _encoder(settings, sources)
        self._model, self._tokenizer = _load(
            ModelSettings(name=model, dtype=settings.dtype),
            AdapterSettings(rank=settings.rank, alpha=settings.alpha, targets=settings.targets),
        )
        directory = locate(model)
        self._held_out = {
            client: legal_rows(sources.parts(client), directory, settings) for client in CLIENTS
        }

    @contextmanager
    def using(self, state: State | None) -> Iterator[None]:
        """Use an adapter within the block, or none."""
        if state is None:
            with self._model.without_adapter():
                yield
        else:
            load_adapter(self._model.peft_model, state)
            yield

    def scores(self, clients: Sequence[str]) -> dict[str, dict[str, float]]:
        """Answer the rows of clients, and measure their loss.

        Returns:
            By client the held-out ``loss`` in nats, and ROUGE, BLEU and ``bertscore``, within 0..1.

        """
        # All rows at once: a step of generation takes little longer with more of them.
        answered = answer(
            model=self._model,
            tokenizer=self._tokenizer,
            prepared=self._prepared(clients),
            max_tokens=_MAX_TOKENS,
            new_tokens=self._settings.new_tokens,
        )
        texts = iter(answered.texts)
        return {
            client: self._score(client, [next(texts) for _ in self._held_out[client].prompts])
            for client in clients
        }

    def _prepared(self, clients: Sequence[str]) -> Prepared:
        prompts = [p.tokens for client in clients for p in self._held_out[client].prompts]
        # The clients' tasks differ in nothing but their rows.
        return Prepared(TASKS[clients[0]], questions=[], candidates=[], right=[], prompts=prompts)

    def _score(self, client: str, texts: Sequence[str]) -> dict[str, float]:
        held_out = self._held_out[client]
        loss = held_out_loss(
            model=self._model,
            examples=held_out.examples,
            padding=self._tokenizer.pad_token_id,
            batch_size=self._settings.batch_size,
        )
        references = [prompt.reference for prompt in held_out.prompts]
        scores = {"loss": loss.loss, **score(texts, references)}
        if self._encoder is not None:
            scores["bertscore"] = bertscore(texts, references, self._encoder)
        return scores

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Answer questions."""
        return continue_prompts(
            model=self._model,
            tokenizer=self._tokenizer,
            prompts=tokenize_prompts(prompt_rows(questions), self._tokenizer),
            max_new=self._settings.new_tokens,
            settings=GREEDY,
        )


def encoder_digest(settings: FedJudge, sources: Sources) -> str:
    """Return a digest of BERTScore's encoder; empty if there is none.

    Raises:
        SourceError: It can't be used; the message says why.

    """
    encoder = _encoder(settings, sources)
    if encoder is None:
        return ""
    try:
        encoder.check()
        return sources.model_digest(settings.encoder)
    except (EncoderError, BaseModelError) as error:
        raise SourceError(f"BERTScore's encoder {settings.encoder}: {error}") from error


def _encoder(settings: FedJudge, sources: Sources) -> Encoder | None:
    if not settings.encoder:
        return None
    return Encoder(sources.model(settings.encoder), settings.encoder_layer)


@keep_one
def _load(model: ModelSettings, adapter: AdapterSettings) -> tuple[WholeModel, Any]:
    base = load_base_model(model)
    return WholeModel(attach_adapter(base.model, adapter, base.reference)), base.tokenizer
