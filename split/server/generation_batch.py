"""Text generation of several lanes with one body, whose next tokens one pass can compute."""

import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from finetuning.settings import AdapterSettings
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.evaluation import CachedExtension, Prompts
from split.server.compute import ComputeThread
from split.server.interfaces import Body
from split.server.session import Account
from split.server.stage_client import StagedKeyValues

_MAX_COLUMNS = 2048  # of texts that share a pass; longer texts gain little from it
_MAX_ROWS = 16  # of each lane, because a common pass copies its adapter for each row


@dataclass(eq=False)
class CachedTexts:
    """A lane's batch of texts, with the keys and values that the body's blocks have computed."""

    adapter: str | None  # name of the body's adapter; None for the base model
    key_values: KeyValues | StagedKeyValues
    account: Account


@dataclass(eq=False)
class NextTokens:
    """The next token of each of a lane's texts, which the pass of another lane may compute."""

    texts: CachedTexts
    hidden: torch.Tensor  # (rows, 1, hidden)
    output: torch.Tensor | None = None  # None until it is computed

    def may_share_pass(self, other: "NextTokens") -> bool:
        """Return whether one pass can compute both, without too much padding."""
        own, others = self.texts.key_values, other.texts.key_values
        if not isinstance(own, KeyValues) or not isinstance(others, KeyValues):
            return False  # they are at stages
        lengths = own.length, others.length
        limit = min(2 * min(lengths) + 32, _MAX_COLUMNS)
        return own.can_join and max(lengths) <= limit


def is_next_tokens(extension: CachedExtension) -> bool:
    """Return whether an extension is one token for each of a few texts."""
    rows, columns, _ = extension.hidden.shape
    is_small = columns == 1 and rows <= _MAX_ROWS
    return is_small and not (extension.endings or extension.drop)


class GenerationBatch:
    """Computes the cached texts of all lanes. Its methods are called in the compute thread."""

    def __init__(self, body: Body, adapter: AdapterSettings, compute: ComputeThread) -> None:
        self.body = body
        self.adapter = adapter  # settings of all models' adapters
        self.compute = compute
        self._last_pass = 1, 0.0  # number of lanes, and duration in seconds

    def begin(
        self, prompts: Prompts, adapter: str | None, account: Account
    ) -> tuple[CachedTexts, torch.Tensor]:
        """Compute the blocks for prompts; return the texts and the hidden states."""
        columns = prompts.hidden.shape[1]
        body = self.body.with_cache()
        key_values: KeyValues | StagedKeyValues
        if isinstance(body, Part):
            key_values = KeyValues(body, prompts.padding, columns)
        else:
            key_values = body(prompts.padding, columns)
        try:
            return CachedTexts(adapter, key_values, account), key_values.extend(prompts.hidden)
        except Exception:
            key_values.free()  # from stages; the caller has no reference to the texts
            raise

    def extend(self, texts: CachedTexts, extension: CachedExtension) -> torch.Tensor:
        """Compute the blocks for several next tokens, or for endings of each text."""
        if extension.endings:
            texts.key_values.repeat(extension.endings)
        return texts.key_values.extend(extension.hidden, extension.drop)

    def next_tokens(self, request: NextTokens) -> torch.Tensor:
        """Compute the next tokens of a lane, and of lanes whose jobs wait in the queue.

        The jobs of other lanes, whose ``detail`` is a ``NextTokens``, are run before returning.
        """
        if request.output is not None:
            return request.output
        began = time.perf_counter()
        lanes, seconds = self._last_pass
        self._last_pass = 1, 0.0
        jobs = self.compute.take_with(
            lambda job: request.may_share_pass(job.detail), lanes - 1, seconds / 2
        )
        if jobs:
            requests = [request, *(job.detail for job in jobs)]
            # After an error, such as out of memory, each job runs alone, to isolate the error.
            with suppress(Exception):
                self._compute_together(requests, began)
            for job in jobs:
                self.compute.run(job)
        if request.output is None:
            self.body.use(request.texts.adapter)
            request.output = request.texts.key_values.extend(request.hidden)
        return request.output

    def _compute_together(self, requests: list[NextTokens], began: float) -> None:
        started = time.perf_counter()
        texts = [request.texts for request in requests]
        hidden = [request.hidden for request in requests]
        rows = [len(states) for states in hidden]
        caches = [own for each in texts if isinstance(own := each.key_values, KeyValues)]
        with caches[0].part.using_together([each.adapter for each in texts], rows):
            outputs = KeyValues.extend_together(caches, hidden)
        seconds = time.perf_counter() - started
        self._last_pass = len(requests), seconds
        # Each job is charged for its share, although the first one has computed the others' too.
        texts[0].account.seconds_computing -= time.perf_counter() - began
        for request, output in zip(requests, outputs, strict=True):
            request.output = output
            share = len(output) / sum(rows)
            request.texts.account.seconds_computing += seconds * share
