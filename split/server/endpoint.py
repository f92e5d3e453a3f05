"""The base class of block servers, with keys, tickets, lanes and the compute thread."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from finetuning.settings import AdapterSettings
from split.lane.lane import Lane
from split.lane.listening import LaneServer
from split.lane.transport import PeerLimits
from split.protocol.frames import Limits
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity, Invitation
from split.server.compute import ComputeThread
from split.server.generation_batch import GenerationBatch
from split.server.interfaces import Body
from split.server.session import Session, describe_lane_error
from split.settings import SplitSettings

_log = logging.getLogger(__name__)


class Endpoint(ABC):
    """Base class of servers that accept lanes of invited clients until ``stop`` is called.

    Subclasses implement ``_serve``, and call ``_lanes.start`` when they are ready for lanes. Keys
    and tickets are in memory only. An OSError is raised if the server can't listen on the address
    in ``split.listen``.
    """

    def __init__(
        self,
        body: Body,
        adapter: AdapterSettings,
        split: SplitSettings,
        limits: Limits,
        peers: PeerLimits | None = None,
    ) -> None:
        self.body = body
        self._adapter = adapter
        self._split = split
        self._keys = ServerKeys(split.key_exchange)
        self._lanes = LaneServer(
            listen=split.listen,
            keys=self._keys,
            limits=limits,
            on_lane=self._serve,
            resume_timeout=split.resume_timeout,
            peers=peers,
        )
        self.compute = ComputeThread(split.activation_budget)
        self._generation = GenerationBatch(body, adapter, self.compute)

    @property
    def address(self) -> str:
        """The address at which clients reach the server, as host:port."""
        return self._split.advertise or self._lanes.address

    def stop(self) -> None:
        """End all lanes and threads."""
        self._lanes.stop()
        self.body.close()  # first, because the compute thread may be waiting for a stage
        self.compute.stop()

    def _invite(self, identity: Identity, lifetime: float, standing: bool = False) -> Invitation:
        """Invite a client to open one lane or, if ``standing``, any number of lanes."""
        return Invitation(
            address=self.address,
            suite=self._split.key_exchange,
            server_key=self._keys.public,
            identity=identity,
            ticket=self._lanes.issue(identity, lifetime, standing),
        )

    @abstractmethod
    def _serve(self, lane: Lane) -> None:
        """Serve a lane. Called in a separate thread for each lane."""


@contextmanager
def end_lane_on_error(session: Session) -> Iterator[None]:
    """If the ``with`` block raises an error, end the session's lane and record the error."""
    try:
        yield
    except RuntimeError as error:  # includes LaneError and ProtocolError
        session.give_up(describe_lane_error(error))
    except Exception as error:
        _log.exception("serving %r failed", session.lane)
        session.give_up(f"the server failed ({type(error).__name__})")
