"""Open a lane to a block server, to train or evaluate a split model."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from split.client.split_model import SplitModel
from split.lane.dialling import PATIENCE_SECONDS, open_lane
from split.model.part import Part
from split.model.partition import PartyName
from split.protocol.frames import Limits, average_bytes
from split.protocol.tickets import Invitation
from split.settings import SplitSettings


@contextmanager
def connect(
    invitation: Invitation,
    parts: Mapping[PartyName, Part],
    split: SplitSettings,
    max_batch_tokens: int,
    deadline: float,
    training: bool = True,
    noise: float = 0.0,
    patience: float = PATIENCE_SECONDS,
    busy_until: float | None = None,
) -> Iterator[SplitModel]:
    """Yield a split model whose body is at a block server; close the lane to the server on exit.

    Args:
        invitation: Invitation to the block server.
        parts: Head and tail, with their adapters attached if there are any.
        split: Wire type, window, time limits and averaging period.
        max_batch_tokens: Number of padded tokens of the largest micro-batch, prefixes included.
        deadline: Time at which the lane ends, on ``time.monotonic``'s clock.
        training: Whether to train the model; only then can adapters be averaged over the lane.
        noise: Standard deviation of the noise that is added to hidden states before they are sent,
            relative to the root mean square of each token's hidden state.
        patience: Seconds for which to retry if the server refuses or does not answer.
        busy_until: Time until which to retry while the server is busy; None means the deadline.

    Raise ``LaneError`` if the block server can't be reached or refuses the handshake.
    """
    averaged = training and split.average_every > 0
    trained = [part.trainable() for part in parts.values()] if averaged else []
    weights = sum(p.numel() for own in trained for p in own.values())
    limits = Limits(
        hidden=parts["head"].hidden_size,
        wire_dtype=split.wire_dtype,
        max_tokens=max_batch_tokens,
        average_bytes=average_bytes(weights) if averaged else 0,
        window=split.window,
    )
    lane = open_lane(
        invitation=invitation,
        limits=limits,
        deadline=deadline,
        resume_timeout=split.resume_timeout,
        patience=patience,
        busy_until=busy_until,
    )
    with closing(lane):
        yield SplitModel(
            head=parts["head"],
            tail=parts["tail"],
            lane=lane,
            frame_timeout=split.frame_timeout,
            deadline=deadline,
            noise=noise,
        )
