import threading

import pytest

from split.protocol.errors import LaneBusyError, Refusal, TicketError
from split.protocol.tickets import Identity, Ticket, TicketBook

COURT = Identity("run", 3, "court")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def refusal(call, *arguments):
    with pytest.raises(TicketError) as raised:
        call(*arguments)
    return raised.value.refusal


def test_an_issued_ticket_is_found_until_it_is_spent():
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    assert book.find(ticket.identifier) == (ticket, COURT)
    assert book.find(ticket.identifier) == (ticket, COURT)
    book.spend(ticket.identifier)
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_USED
    assert refusal(book.spend, ticket.identifier) is Refusal.TICKET_USED


def test_a_ticket_is_good_again_when_it_is_registered_again_and_remembers_what_came():
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    book.note_hello(ticket.identifier, b"first")
    book.spend(ticket.identifier)
    book.register(ticket, COURT, 60)
    assert book.find(ticket.identifier) == (ticket, COURT)
    with pytest.raises(LaneBusyError):
        book.note_hello(ticket.identifier, b"first")


def test_an_unknown_ticket_is_named():
    assert refusal(TicketBook().find, bytes(16)) is Refusal.TICKET_UNKNOWN


def test_an_expired_ticket_is_named_and_in_the_end_forgotten():
    clock = Clock()
    book = TicketBook(clock)
    ticket = book.issue(COURT, 60)
    clock.now += 59
    book.find(ticket.identifier)
    clock.now += 1
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_EXPIRED
    assert refusal(book.spend, ticket.identifier) is Refusal.TICKET_EXPIRED
    clock.now += 2 * 3600
    book.issue(COURT, 60)
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_UNKNOWN


def test_of_many_threads_one_spends_a_ticket():
    book = TicketBook()
    ticket = book.issue(COURT, 60)
    barrier = threading.Barrier(8)
    outcomes = []

    def spend():
        barrier.wait()
        try:
            book.spend(ticket.identifier)
            outcomes.append("spent")
        except TicketError as error:
            outcomes.append(error.refusal)

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["spent"] + [Refusal.TICKET_USED] * 7


def test_a_standing_ticket_is_not_spent_and_expires():
    clock = Clock()
    book = TicketBook(clock)
    ticket = book.issue(COURT, 60, standing=True)
    for _ in range(3):
        assert book.find(ticket.identifier) == (ticket, COURT)
        book.spend(ticket.identifier)
    clock.now += 60
    assert refusal(book.find, ticket.identifier) is Refusal.TICKET_EXPIRED
    assert refusal(book.spend, ticket.identifier) is Refusal.TICKET_EXPIRED


def test_a_standing_ticket_s_first_messages_are_no_good_again():
    """However often it was used, whoever heard one of them can't begin a handshake with it."""
    book = TicketBook()
    ticket = book.issue(COURT, 60, standing=True)
    hellos = [number.to_bytes(32, "big") for number in range(1000)]
    for hello in hellos:
        book.note_hello(ticket.identifier, hello)
    for hello in hellos[:: len(hellos) - 1]:
        with pytest.raises(LaneBusyError):
            book.note_hello(ticket.identifier, hello)


def test_a_ticket_shows_its_identifier_only():
    ticket = TicketBook().issue(COURT, 60)
    assert repr(ticket.secret) not in repr(ticket)
    assert ticket.secret.hex() not in repr(ticket)


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
    with pytest.raises(ValueError, match="a ticket is"):
        Ticket(bytes(identifier), bytes(secret))
