"""A block server for trained models, which invited clients can use at any time."""

import logging
import math
import threading
import time
from functools import partial

from finetuning.settings import AdapterSettings
from split.lane.lane import Lane
from split.lane.transport import PeerLimits, time_limit
from split.protocol.errors import LaneTimeoutError
from split.protocol.frames import Limits
from split.protocol.tickets import Identity, Invitation
from split.server.endpoint import Endpoint, end_lane_on_error
from split.server.evaluation_session import EvaluationSession, Models
from split.server.interfaces import Body
from split.settings import SplitSettings

_log = logging.getLogger(__name__)
# Columns of drafts that may follow a prompt in its frame; ``transformers`` drafts at most 20.
_MAX_DRAFTED = 32


class ModelServer(Endpoint):
    """Server of the body that accepts lanes until it is stopped.

    A client has one lane at a time: when the client opens another lane, the older lane is ended.

    The adapters of all models have the same settings. ``run`` is the server's name in handshakes.
    An OSError is raised if the server can't listen on the address in ``split.listen``.
    """

    def __init__(
        self,
        body: Body,
        adapter: AdapterSettings,
        split: SplitSettings,
        run: str,
        max_prompt_length: int,
        peers: PeerLimits | None = None,
    ) -> None:
        self._run = run
        # Models that a client may use, and time of expiry on ``time.monotonic``'s clock.
        self._grants: dict[Identity, tuple[Models, float]] = {}
        self._sessions: dict[Identity, EvaluationSession] = {}
        self._lock = threading.Lock()
        limits = Limits(
            hidden=body.hidden_size,
            wire_dtype=split.wire_dtype,
            max_tokens=split.activation_budget,
            window=1,  # text generation has one frame in flight
            max_columns=max_prompt_length + _MAX_DRAFTED,
        )
        super().__init__(body, adapter, split, limits, peers)
        self._lanes.start()

    def invite(self, client: str, models: Models, lifetime: float) -> Invitation:
        """Invite a client to use models over any number of lanes.

        After ``lifetime`` seconds, the invitation expires and open lanes are ended.
        """
        identity = Identity(self._run, 0, client)
        self._grants[identity] = models, time.monotonic() + lifetime
        return self._invite(identity, lifetime, standing=True)

    def _serve(self, lane: Lane) -> None:
        models, expires = self._grants[lane.identity]
        session = EvaluationSession(
            lane=lane,
            models=models,
            generation=self._generation,
            split=self._split,
            max_batch_tokens=0,  # only cached texts, which count towards the activation budget
            max_cached_tokens=self._split.activation_budget,
            lifetime=math.inf,  # no limit on total silence: there is no round to delay
        )
        with self._lock:
            older = self._sessions.get(lane.identity)
            self._sessions[lane.identity] = session
        if older is not None:
            older.lane.close("another lane was opened with this invitation")
        expire = partial(lane.close, "the invitation has expired")
        with time_limit(expires - time.monotonic(), expire), end_lane_on_error(session):
            try:
                session.serve()
            except LaneTimeoutError as error:
                # Close without an error, so that a slow user can open another lane and continue.
                session.account.error = str(error)
                lane.close()
        with self._lock:
            if self._sessions.get(lane.identity) is session:
                del self._sessions[lane.identity]
        account = session.account
        _log.info(
            "%s: %d tokens computed%s",
            account.client,
            account.tokens,
            f"; the lane ended early: {account.error}" if account.error else "",
        )
