import pytest

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.tickets import Identity, Ticket, TicketBook

COURT = Identity("run", 3, "court")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def refusal(call, *arguments):
    with pytest.raises(HandshakeError) as raised:
        call(*arguments)
    return raised.value.refusal


def resumption(number):
    return Ticket(bytes([number]) * 16, bytes([number]) * 32)


def test_a_ticket_is_found_until_its_lane_is_confirmed():
    book = TicketBook()
    ticket, first = book.issue(COURT, 60), resumption(1)
    lane = book.accept(ticket.identifier, first)
    assert book.find(ticket.identifier) == (ticket, COURT)
    assert book.find(first.identifier) == (first, COURT)
    book.confirm(lane, first.identifier)
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_USED
    assert book.find(first.identifier) == (first, COURT)
    book.close(lane)
    assert refusal(book.find, first.identifier) is Refusal.TICKET_UNKNOWN


def test_all_tickets_of_a_lane_are_valid_until_one_is_confirmed():
    """A client whose confirmations get lost keeps using the ticket that it knows."""
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    lanes = {book.accept(ticket.identifier, resumption(n)) for n in range(1, 30)}
    assert len(lanes) == 1
    assert book.find(ticket.identifier) == (ticket, COURT)
    assert refusal(book.find, resumption(1).identifier) is Refusal.TICKET_UNKNOWN
    lane = lanes.pop()
    book.confirm(lane, resumption(29).identifier)
    assert book.find(resumption(29).identifier) == (resumption(29), COURT)
    book.close(lane)
    for number in range(1, 30):
        assert refusal(book.find, resumption(number).identifier) is Refusal.TICKET_UNKNOWN


@pytest.mark.parametrize(("standing", "most"), [(False, 7), (True, 64)])
def test_the_oldest_of_too_many_streams_is_not_resumed(standing, most):
    """A lane has eight tickets, its first one included; a standing ticket has 64 lanes."""
    book = TicketBook()
    ticket = book.issue(COURT, 60, standing=standing)
    for number in range(most):
        book.accept(ticket.identifier, resumption(number))
    assert book.find(resumption(0).identifier) == (resumption(0), COURT)
    book.accept(ticket.identifier, resumption(most))
    assert refusal(book.find, resumption(0).identifier) is Refusal.TICKET_UNKNOWN
    assert book.find(resumption(1).identifier) == (resumption(1), COURT)


def test_an_older_stream_is_not_confirmed_after_a_newer_one():
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    lane = book.accept(ticket.identifier, resumption(1))
    book.accept(ticket.identifier, resumption(2))
    book.confirm(lane, resumption(2).identifier)
    assert refusal(book.confirm, lane, resumption(1).identifier) is Refusal.TICKET_UNKNOWN


def test_the_secret_of_a_spent_ticket_is_erased():
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    lane = book.accept(ticket.identifier, resumption(1))
    book.confirm(lane, resumption(1).identifier)
    kept = {identifier: entry.secret for identifier, entry in book._entries.items()}
    assert kept == {
        ticket.identifier: bytes(32),
        resumption(1).identifier: resumption(1).secret,
    }


def test_an_expired_ticket_is_named_and_in_the_end_forgotten():
    clock = Clock()
    book = TicketBook(clock)
    ticket = book.issue(COURT, 60)
    clock.now += 59
    book.find(ticket.identifier)
    clock.now += 1
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_EXPIRED
    clock.now += 3600
    book.issue(COURT, 60)
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_EXPIRED
    clock.now += 2 * 3600
    book.issue(COURT, 60)
    assert len(book) == 2
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_UNKNOWN


def test_a_standing_ticket_opens_lanes_until_it_expires():
    clock = Clock()
    book = TicketBook(clock)
    ticket = book.issue(COURT, 60, standing=True)
    lanes = set()
    for number in range(1, 4):
        lane = book.accept(ticket.identifier, resumption(number))
        book.confirm(lane, resumption(number).identifier)
        lanes.add(lane)
    assert len(lanes) == 3
    assert book.find(ticket.identifier) == (ticket, COURT)
    clock.now += 60
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_EXPIRED
    assert refusal(book.find, resumption(1).identifier) is Refusal.TICKET_EXPIRED


@pytest.mark.parametrize("standing", [False, True])
def test_handshakes_that_are_never_confirmed_leave_little(standing):
    book = TicketBook()
    ticket = book.issue(COURT, 60, standing=standing)
    for number in range(2000):
        identifier = number.to_bytes(16, "big")
        book.accept(ticket.identifier, Ticket(identifier, bytes(32)))
    assert len(book) < 150
    assert book.find(ticket.identifier) == (ticket, COURT)


@pytest.mark.parametrize(("standing", "most"), [(False, 64), (True, 2**14)])
def test_first_messages_of_a_ticket_are_accepted_once(standing, most):
    """An eavesdropper can't begin a handshake with a recorded one; memory is bounded."""
    book = TicketBook()
    ticket = book.issue(COURT, 60, standing=standing)
    hellos = [number.to_bytes(32, "big") for number in range(most + 1)]
    for hello in hellos[:most]:
        book.note_hello(ticket.identifier, hello)
    for hello in (hellos[0], hellos[most - 1]):
        with pytest.raises(HandshakeError, match="no more lanes"):
            book.note_hello(ticket.identifier, hello)
    for hello in (hellos[most], hellos[0]):  # the oldest has been forgotten
        book.note_hello(ticket.identifier, hello)


@pytest.mark.parametrize(
    ("run", "round_", "node"),
    [
        ("", 1, "a"),
        ("a", 1, ""),
        ("a" * 256, 1, "a"),
        ("a", 1, "法" * 86),
        ("a", -1, "a"),
        ("a", 2**32, "a"),
    ],
)
def test_names_and_rounds_have_bounds(run, round_, node):
    with pytest.raises(ValueError, match="of a lane"):
        Identity(run, round_, node)


@pytest.mark.parametrize(("identifier", "secret"), [(15, 32), (16, 31)])
def test_tickets_have_exact_lengths(identifier, secret):
    with pytest.raises(ValueError, match="a ticket has"):
        Ticket(bytes(identifier), bytes(secret))
