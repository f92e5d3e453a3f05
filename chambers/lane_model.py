"""A split model whose head and tail are local, and whose middle blocks are at a block server."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch

from chambers.errors import CommandError
from chambers.model_source import ModelSource
from finetuning.data.candidates import CandidateBatch
from split.client.connecting import connect
from split.model.part import Part
from split.model.partition import PartyName
from split.protocol.errors import (
    HandshakeError,
    LaneClosedError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    LaneUnreachableError,
    Refusal,
)
from split.protocol.standing_invitation import StandingInvitation

# Timeout for reaching the server and for its final confirmation; short, since users may wait.
_PATIENCE_SECONDS = 5.0

_Result = TypeVar("_Result")


class LaneModel:
    """Generates text and scores candidate answers through a lane.

    Between batches, the server may close the idle lane, or the network cut it for too long. The
    model then opens a new lane for the next batch.

    The client's parts have their adapters attached; ``source`` contains the adapters' weights.

    Raise ``CommandError`` if no server answers at the invitation's address. Raise ``LaneError`` if
    the server refuses the client.
    """

    def __init__(
        self, parts: Mapping[PartyName, Part], source: ModelSource, invitation: StandingInvitation
    ) -> None:
        self._client_parts = parts
        self._source = source
        self._invitation = invitation
        left = (invitation.expires - datetime.now(UTC)).total_seconds()
        self._deadline = time.monotonic() + left
        try:
            self._open()
        except LaneUnreachableError as error:
            raise CommandError(
                f"no block server answers at {invitation.address}; is `chambers serve` running "
                "there, and can this machine reach it?"
            ) from error

    @property
    def end_tokens(self) -> list[int]:
        """Ids of the tokens that end a text."""
        return self._model.end_tokens

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before the tokens of each row."""
        return self._model.columns_before

    def use(self, source: ModelSource) -> None:
        """Select one of the server's models, with the client's part of its adapter."""
        if source is not self._source:
            self._source = source
            self._attempt(lambda: self._model.choose(source.chosen, source.client_adapter))

    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Continue prompts; see ``finetuning.whole_model.WholeModel``."""
        return self._attempt(lambda: self._model.generate(tokens, mask, new_tokens, **settings))

    def log_probabilities(
        self, batch: CandidateBatch, count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score candidate answers; see ``finetuning.whole_model.WholeModel``."""
        return self._attempt(lambda: self._model.log_probabilities(batch, count))

    def end(self) -> None:
        """End the evaluation; raise ``LaneError`` if the server doesn't confirm the end in time."""
        self._model.end(until=time.monotonic() + _PATIENCE_SECONDS)

    def close(self) -> None:
        """Close the lane; this is allowed even after an error."""
        self._connection.close()

    def _attempt(self, compute: Callable[[], _Result]) -> _Result:
        """Compute a batch, over a new lane if the last one has ended; retry once if it ends now."""
        try:
            self._model.lane.check()
        except LaneError as error:
            self._open_again(error)
        try:
            return compute()
        except LaneClosedError as error:  # the server closed it before the batch arrived there
            self._open_again(error)
        # Reset the generator to the seed of the batch, to draw the same random numbers again.
        torch.manual_seed(torch.initial_seed())
        return compute()

    def _open_again(self, error: LaneError) -> None:
        print(f"{error}; opening a new lane", file=sys.stderr)
        self._connection.close()
        self._open()

    def _open(self) -> None:
        connected = connect(
            invitation=self._invitation.lane,
            parts=self._client_parts,
            split=self._invitation.split,
            max_batch_tokens=self._invitation.max_tokens,
            deadline=self._deadline,
            training=False,
            patience=_PATIENCE_SECONDS,
            busy_until=min(self._deadline, time.monotonic() + 60.0),
        )
        with ExitStack() as on_failure:
            self._model = on_failure.enter_context(connected)
            self._model.choose(self._source.chosen, self._source.client_adapter)
            self._connection = on_failure.pop_all()


def explain_lane_error(error: LaneError, invitation: StandingInvitation) -> CommandError:
    """Explain an error of a lane to the user who holds the invitation."""
    refusal = error.refusal if isinstance(error, HandshakeError) else None
    expired = isinstance(error, LaneDeadlineError) or invitation.expires <= datetime.now(UTC)
    new = "ask the coordinator for a new one"
    if expired or refusal is Refusal.TICKET_EXPIRED:
        reason = f"this invitation has expired; {new}"
    elif isinstance(error, LaneTimeoutError):
        reason = "it has not answered in time; it may be unreachable or busy: try again later"
    elif refusal in {Refusal.TICKET_UNKNOWN, Refusal.SERVER_KEY}:
        reason = f"it was restarted after this invitation was written; {new}"
    elif refusal in {Refusal.SUITE, Refusal.TICKET_FOREIGN, Refusal.AUTHENTICATION}:
        reason = f"the invitation was altered; {new}"
    else:
        reason = str(error)
    return CommandError(f"the block server at {invitation.address}: {reason}")
