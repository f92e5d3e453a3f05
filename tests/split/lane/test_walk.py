"""Random walks over a lane's states, with an attacker that controls the network.

Both ends consist of the protocol's own classes, without threads: handshakes, tickets, streams and
deliveries. The attacker delivers, withholds, repeats, alters and swaps messages. A model without
keys predicts which messages each end must accept, the resulting states, and the delivered frames:
every frame once, in order, and nothing else.
"""

import random
from collections import Counter

import pytest
import torch

from split.lane.stream import Stream
from split.protocol.delivery import Delivery
from split.protocol.errors import HandshakeError, LaneError, Refusal
from split.protocol.frames import Frame, Kind
from split.protocol.handshake import ClientHandshake, ServerHandshake
from split.protocol.payload import Outgoing
from split.protocol.tickets import Identity, TicketBook
from tests.split.lanes import COURT, LIMITS, hybrid_keys

CLINIC = Identity("run", 1, "clinic")
# docs/wire.md: a lane's tickets that are good at once, and handshakes in progress for one identity.
TICKETS, HANDSHAKES = 8, 4
NO_GOOD = {Refusal.TICKET_UNKNOWN, Refusal.TICKET_EXPIRED, Refusal.TICKET_USED}
SIDES = ("client", "server")
TWO_RECORDS = {"adapter": torch.zeros(2**18)}


class End:
    """One end of a lane, and the model's state of this end.

    Attributes:
        delivery: Delivery that is tested.
        link: The connection over which the end sends and receives; None after a cut.
        added: Number of frames that the end's user has sent.
        over: Number of the next frame to be sent over the link.
        received: Numbers of the frames that the end's user has received.
        known: Number of sent frames that the other end has acknowledged.

    """

    def __init__(self):
        self.delivery, self.link = Delivery(), None
        self.added = self.over = self.known = 0
        self.received = []

    def attach(self, link, acknowledged):
        self.delivery.restart(acknowledged)
        self.link, self.known, self.over = link, acknowledged, acknowledged


class Wire:
    """One direction of a connection.

    Attributes:
        records: Records, each with the number of frames that it acknowledges, and the number of the
            frame that it completes, or None.
        next: Index of the record that must be received next.

    """

    def __init__(self):
        self.records, self.next = [], 0


class Link:
    """A handshake, from the client's first message on, and the two resulting streams."""

    def __init__(self, ticket, identity):
        keys = hybrid_keys()
        self.client = ClientHandshake(ticket, identity, keys.public, keys.suite)
        self.ticket, self.hello = ticket.identifier, self.client.hello()
        self.server = self.answer = self.finished = self.lane = self.resumption = None
        self.streams = {}
        self.wires = {side: Wire() for side in SIDES}  # by sender

    def finish(self):
        self.finished, secrets = self.client.finish(self.answer)
        self.streams["client"] = Stream(secrets, LIMITS, True, (0, 0), lambda: None)

    def accept(self):
        secrets, used = self.server.accept(self.finished)
        assert used == self.ticket
        self.streams["server"] = Stream(secrets, LIMITS, False, (0, 0), lambda: None)
        return secrets.resumption

    def seal(self, sender, frame, acknowledged, number=None):
        """Send a frame's records; without ``number``, they complete no counted frame."""
        outgoing = frame if isinstance(frame, Outgoing) else Outgoing(frame, LIMITS)
        *before, last = self.streams[sender].seal(outgoing, acknowledged)
        records = [(record, acknowledged, None) for record in before]
        self.wires[sender].records += [*records, (last, acknowledged, number)]


def refused(call, *arguments, kind=HandshakeError, why=frozenset()):
    try:
        call(*arguments)
    except kind as error:
        assert not why or error.refusal in why
        return
    raise AssertionError(f"{call.__qualname__} has accepted what it must refuse")


def flipped(message, place):
    place %= len(message)
    return message[:place] + bytes([message[place] ^ 1 << place % 8]) + message[place + 1 :]


class Walk:
    """Both ends, the attacker, and the model.

    Attributes:
        good: Tickets that the server must accept, oldest first.
        seen: First messages that the server has received.
        dialling: The client's handshake in progress.
        waiting: The server's handshakes in progress, oldest first.
        newest: The only waiting handshake that may still be confirmed.
        taken: Counts of what both ends have accepted.

    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.book = TicketBook()
        self.ticket = self.book.issue(COURT, 3600)
        self.good, self.seen, self.taken = [self.ticket.identifier], set(), Counter()
        self.ends = {side: End() for side in SIDES}
        self.links, self.waiting, self.dialling, self.newest = [], [], None, None
        self.foreign = self.lane_of_another_client()

    def lane_of_another_client(self):
        """Return a link of a different client, whose messages the attacker can insert."""
        link = Link(self.book.issue(CLINIC, 3600), CLINIC)
        link.server = ServerHandshake(hybrid_keys(), self.book)
        link.server.read(link.hello)
        link.answer = link.server.answer()
        link.finish()
        link.accept()
        for side in SIDES:
            link.seal(side, Frame(Kind.CONFIRM), 0)
            link.seal(side, Frame(Kind.STEP), 0)
        return link

    def go(self, steps):
        attacks = [
            self.hello_arrives,
            self.answer_arrives,
            self.finished_arrives,
            self.confirm_arrives_at_client,
            self.confirm_arrives_at_server,
            self.record_arrives,
            self.cut,
            self.dial,
            self.confirmations_get_lost,
        ]
        for _ in range(steps):
            self.advance() if self.random.random() < 0.7 else self.random.choice(attacks)()
            self.check()

    def advance(self):
        """Take the next step of an undisturbed handshake."""
        client, link = self.ends["client"], self.dialling
        if link is not None:
            if link.hello not in self.seen:
                self.take_hello(link)
            elif link.finished is None:
                self.take_answer()
            elif link.lane is not None:
                self.take_confirm_of_server()
            elif link in self.waiting:
                self.take_finished(link)
            else:
                self.dial()
        elif client.link in self.waiting:
            self.take_confirm_of_client(client.link)
        elif client.link is None or client.link is not self.ends["server"].link:
            self.dial()
        else:
            side = self.random.choice(SIDES)
            self.random.choice([self.send, self.transmit, self.take_record])(side)

    def finish(self):
        """Deliver all remaining frames over an honest network, after any walk."""
        self.dial()
        link = self.dialling
        while self.ends["server"].link is not link:
            self.advance()
        for side, end in self.ends.items():
            while end.over < end.added:
                self.transmit(side)
        for side in SIDES:
            while self.take_record(side):
                self.check()
        for side, end in self.ends.items():
            assert len(end.received) == self.ends[other(side)].added

    def check(self):
        for side, end in self.ends.items():
            sent, arrived = self.ends[other(side)].added, self.ends[other(side)].received
            assert end.received == list(range(len(end.received)))
            assert len(end.received) <= sent
            assert end.delivery.acknowledged == end.known <= len(arrived)
        assert self.ticket.identifier in self.good  # so the client can always go on
        for identifier in {self.ticket.identifier, *(link.ticket for link in self.links)}:
            if identifier in self.good:
                self.book.find(identifier)
            else:
                refused(self.book.find, identifier, why=NO_GOOD)

    # What the attacker draws: the newest message or any other, as it is or altered.

    def drawn(self, items):
        items = list(items)
        return items[-1] if self.random.random() < 0.5 else self.random.choice(items)

    def place(self):
        return self.random.randrange(2**20) if self.random.random() < 0.5 else None

    def record(self, sender):
        """Choose a record of any connection; return the connection, number and bytes."""
        links = [link for link in (self.foreign, *self.links) if link.wires[sender].records]
        link = self.drawn(links)
        number, (record, _, _) = self.drawn(enumerate(link.wires[sender].records))
        return link, number, record

    # The handshake.

    def dial(self):
        """Dial as a client that has noticed a cut, or believes that there is one."""
        self.ends["client"].link = None
        self.dialling = Link(self.ticket, COURT)
        self.links.append(self.dialling)

    def confirmations_get_lost(self):
        """Repeat handshakes with one ticket, whose confirmations never reach the client."""
        for _ in range(self.random.choice([1, TICKETS])):
            self.dial()
            self.take_hello(self.dialling)
            self.take_answer()
            self.take_finished(self.dialling)
            self.check()

    def hello_arrives(self):
        link, place = self.drawn([self.foreign, *self.links]), self.place()
        if link is not self.foreign and place is None:
            return self.take_hello(link)
        hello = link.hello if place is None else flipped(link.hello, place)
        return refused(ServerHandshake(hybrid_keys(), self.book).read, hello)

    def take_hello(self, link):
        server = ServerHandshake(hybrid_keys(), self.book)
        if link.ticket not in self.good:
            return refused(server.read, link.hello, why=NO_GOOD)
        if link.hello in self.seen:
            return refused(server.read, link.hello, why={Refusal.BUSY})
        assert server.read(link.hello) == COURT
        self.seen.add(link.hello)
        link.server, link.answer = server, server.answer()
        # If there are too many, the time of the oldest is over.
        self.waiting = [*self.waiting, link][-HANDSHAKES:]
        return None

    def answer_arrives(self):
        link = self.dialling
        if link is None or link.finished is not None:
            return None
        made = [each for each in (self.foreign, *self.links) if each.answer]
        source, place = self.drawn(made), self.place()
        if source is link and place is None:
            return self.take_answer()
        answer = source.answer if place is None else flipped(source.answer, place)
        return refused(link.client.finish, answer)

    def take_answer(self):
        self.dialling.finish()

    def finished_arrives(self):
        waiting = [link for link in self.waiting if link.lane is None]
        if not waiting:
            return None
        made = [each for each in (self.foreign, *self.links) if each.finished]
        link, source, place = self.drawn(waiting), self.drawn(made), self.place()
        if source is link and place is None:
            return self.take_finished(link)
        finished = source.finished if place is None else flipped(source.finished, place)
        return refused(link.server.accept, finished)

    def take_finished(self, link):
        resumption = link.accept()
        if link.ticket not in self.good:
            self.waiting.remove(link)
            return refused(self.book.accept, link.ticket, resumption, why=NO_GOOD)
        link.lane, link.resumption = self.book.accept(link.ticket, resumption), resumption
        assert len({each.lane for each in self.links if each.lane}) == 1
        self.good.remove(link.ticket)
        self.good += [resumption.identifier, link.ticket]
        del self.good[:-TICKETS]
        self.newest, self.ends["server"].link = link, None
        link.seal("server", Frame(Kind.CONFIRM), len(self.ends["server"].received))
        self.taken["streams"] += 1
        return None

    # The first records, before which nothing is authentic. A wrong one is a cut.

    def confirm_arrives_at_client(self):
        link = self.dialling
        if link is None or link.finished is None:
            return None
        (source, number, record), place = self.record("server"), self.place()
        if source is link and number == 0 and place is None:
            return self.take_confirm_of_server()
        self.dialling = None
        record = record if place is None else flipped(record, place)
        return refused(link.streams["client"].open_confirmation, record, kind=LaneError)

    def take_confirm_of_server(self):
        link, client = self.dialling, self.ends["client"]
        record, acknowledged, _ = link.wires["server"].records[0]
        link.streams["client"].open_confirmation(record)
        assert link.streams["client"].opener.acknowledged == acknowledged
        link.wires["server"].next = 1
        self.ticket, self.dialling = link.resumption, None
        client.attach(link, acknowledged)
        link.seal("client", Frame(Kind.CONFIRM), len(client.received))

    def confirm_arrives_at_server(self):
        waiting = [link for link in self.waiting if link.lane]
        if not waiting:
            return None
        link, (source, number, record), place = self.drawn(waiting), self.record("client"), None
        if source is link and number == 0:
            return self.take_confirm_of_client(link)
        place = self.place()
        self.waiting.remove(link)
        record = record if place is None else flipped(record, place)
        return refused(link.streams["server"].open_confirmation, record, kind=LaneError)

    def take_confirm_of_client(self, link):
        record, acknowledged, _ = link.wires["client"].records[0]
        self.waiting.remove(link)
        link.streams["server"].open_confirmation(record)
        assert link.streams["server"].opener.acknowledged == acknowledged
        if link is not self.newest:
            return
        self.book.confirm(link.lane, link.resumption.identifier)
        self.good = [link.resumption.identifier]
        link.wires["client"].next = 1
        self.ends["server"].attach(link, acknowledged)
        self.taken["confirmed"] += 1

    # Frames.

    def send(self, side):
        end = self.ends[side]
        tensors = TWO_RECORDS if end.added % 8 == 3 else {}
        frame = Frame(Kind.AVERAGE if tensors else Kind.STEP, end.added, tensors=tensors)
        end.delivery.add(Outgoing(frame, LIMITS))
        end.added += 1

    def transmit(self, side):
        end = self.ends[side]
        outgoing = end.delivery.next()
        assert (outgoing.frame.step if outgoing else end.added) == end.over
        if outgoing is not None:
            end.link.seal(side, outgoing, len(end.received), end.over)
            end.over += 1

    def take_record(self, side):
        """Receive the next record; return whether there is one."""
        end = self.ends[side]
        wire = end.link.wires[other(side)]
        if wire.next == len(wire.records):
            return False
        record, acknowledged, number = wire.records[wire.next]
        wire.next += 1
        frame = end.link.streams[side].open(record)
        end.delivery.acknowledge(end.link.streams[side].opener.acknowledged)
        self.ends[side].known = acknowledged
        assert (frame and frame.step) == number
        if frame is not None:
            end.received.append(frame.step)
            self.taken["frames"] += 1
        return True

    def record_arrives(self):
        """Deliver a record that is repeated, moved, altered, or from a different stream or lane."""
        linked = [side for side, end in self.ends.items() if end.link]
        if not linked:
            return
        side, sender = self.random.choice(linked), self.random.choice(SIDES)
        end, place = self.ends[side], self.place()
        source, number, record = self.record(sender)
        due = end.link.wires[other(side)].next
        if source is end.link and sender == other(side) and number == due and place is None:
            place = 0
        record = record if place is None else flipped(record, place)
        refused(end.link.streams[side].open, record, kind=LaneError)
        end.link = None

    def cut(self):
        self.ends[self.random.choice(SIDES)].link = None


def other(side):
    return "server" if side == "client" else "client"


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_accept_what_the_model_says_and_nothing_else(seed):
    walk = Walk(seed)
    walk.go(300)
    walk.finish()
    # The walk has been where it matters.
    assert walk.taken["streams"] > walk.taken["confirmed"] > 3
    assert walk.taken["frames"] > 10
