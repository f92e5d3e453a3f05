"""The endpoint of a block server, with its keys, tickets, lanes and compute thread."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from split.lane.lane import Lane
from split.lane.listening import LaneServer
from split.protocol.errors import LaneError, ProtocolError
from split.protocol.frames import Limits
from split.protocol.invitation import Invitation
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity
from split.server.compute import ComputeThread
from split.server.session import Session
from split.settings import SplitSettings

_log = logging.getLogger(__name__)
_MAX_LANES = 256


class Endpoint:
    """Endpoint that accepts the lanes of invited clients until it is stopped.

    Args:
        split: Addresses, key exchange, activation budget and time limits.
        limits: Limits on the frames of clients.
        on_lane: Function that serves a lane, called in a separate thread for each lane.

    Attributes:
        compute: Thread that runs the jobs of all sessions.
        keys: The server's keys, in memory only.

    Raises:
        OSError: The server can't listen on the address in ``split.listen``.

    """

    def __init__(
        self, split: SplitSettings, limits: Limits, on_lane: Callable[[Lane], None]
    ) -> None:
        self._split = split
        self.keys = ServerKeys(split.key_exchange)
        self._server = LaneServer(
            listen=split.listen,
            keys=self.keys,
            limits=limits,
            on_lane=on_lane,
            maximum_lanes=_MAX_LANES,
            resume_timeout=split.resume_timeout,
        )
        self.compute = ComputeThread(split.activation_budget)

    def start(self) -> None:
        """Start accepting lanes."""
        self._server.start()

    @property
    def address(self) -> str:
        """The address at which clients reach the server, as host:port."""
        return self._split.advertise or self._server.address

    def invite(self, identity: Identity, lifetime: float, standing: bool = False) -> Invitation:
        """Invite a client.

        Args:
            identity: Run, round and client.
            lifetime: Seconds for which the ticket is valid.
            standing: Whether the ticket is valid for any number of lanes instead of one.

        """
        return Invitation(
            address=self.address,
            suite=self._split.key_exchange,
            server_key=self.keys.public,
            identity=identity,
            ticket=self._server.issue(identity, lifetime, standing=standing),
        )

    def stop(self) -> None:
        """End all lanes and threads."""
        self._server.stop()
        self.compute.stop()


@contextmanager
def lane_ended_by_errors(session: Session) -> Iterator[None]:
    """End a session's lane if the ``with`` block raises, and record the error in its account."""
    try:
        yield
    except (LaneError, ProtocolError, RuntimeError) as error:
        session.give_up(f"{type(error).__name__}: {error}")
    except Exception as error:
        _log.exception("serving %r failed", session.lane)
        session.give_up(f"the server failed ({type(error).__name__})")
