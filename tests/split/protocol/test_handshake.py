import base64
import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.handshake import (
    HANDSHAKE_VERSION,
    MAX_HELLO_BYTES,
    ClientHandshake,
    ServerHandshake,
    hello_context,
    hello_mac,
    read_hello,
)
from split.protocol.keys import ServerKeys, wrap
from split.protocol.tickets import Identity, Ticket, TicketBook

COURT = Identity("run", 7, "court")
HYBRID = "ml-kem-768-x25519"
SUITES = [HYBRID, "rsa-3072"]


@functools.cache
def keys_of(suite):
    return ServerKeys(suite)


class Pair:
    """A client and a server with one ticket."""

    def __init__(self, suite=HYBRID, identity=COURT, keys=None):
        self.keys = keys or keys_of(suite)
        self.book = TicketBook()
        self.ticket = self.book.issue(identity, 60)
        self.client = ClientHandshake(self.ticket, identity, self.keys.public, self.keys.suite)
        self.server = ServerHandshake(self.keys, self.book)

    def still_good(self):
        self.book.find(self.ticket.identifier)
        return True


def answered(server, hello):
    server.read(hello)
    return server.answer()


def refusal(call, *arguments):
    with pytest.raises(HandshakeError) as raised:
        call(*arguments)
    return raised.value.refusal


def with_mac(pair, hello):
    """Return ``hello`` with a valid MAC, as the owner of the pair's ticket can create it."""
    body = hello_context(hello) + hello.wrapped
    return body + hello_mac(pair.ticket, body)


def flipped(message, place):
    return message[:place] + bytes([message[place] ^ 0x01]) + message[place + 1 :]


@pytest.mark.parametrize("suite", SUITES)
def test_both_sides_have_the_same_keys(suite):
    pair = Pair(suite)
    finished, mine = pair.client.finish(answered(pair.server, pair.client.hello()))
    assert pair.still_good()
    theirs, ticket = pair.server.accept(finished)
    assert (mine, ticket) == (theirs, pair.ticket.identifier)
    assert len({mine.up, mine.down, mine.resumption.secret, pair.ticket.secret}) == 4
    assert pair.still_good()


def test_no_two_lanes_have_the_same_keys():
    secrets = []
    for _ in range(2):
        pair = Pair()
        secrets.append(pair.client.finish(answered(pair.server, pair.client.hello()))[1])
    assert secrets[0].up != secrets[1].up


@pytest.mark.parametrize("suite", SUITES)
def test_every_altered_byte_of_the_hello_is_noticed(suite):
    pair = Pair(suite)
    hello = pair.client.hello()
    named = dict.fromkeys((0, 1, 2, 3, 5, 11, 15), Refusal.MALFORMED)  # 11 and 15 are lengths
    named |= {4: Refusal.VERSION, 6: Refusal.SUITE}
    named |= dict.fromkeys(range(21, 37), Refusal.TICKET_UNKNOWN)
    for place in range(len(hello)):
        found = refusal(answered, pair.server, flipped(hello, place))
        assert found is named.get(place, Refusal.AUTHENTICATION)
    assert pair.still_good()
    finished, _ = pair.client.finish(answered(pair.server, hello))
    pair.server.accept(finished)


def test_every_altered_byte_of_the_answer_is_noticed():
    pair = Pair()
    answer = answered(pair.server, pair.client.hello())
    named = dict.fromkeys((0, 1, 2, 3, 5), Refusal.MALFORMED) | {4: Refusal.VERSION}
    for place in range(len(answer)):
        found = refusal(pair.client.finish, flipped(answer, place))
        assert found is named.get(place, Refusal.AUTHENTICATION)
    assert pair.still_good()


def test_every_altered_byte_of_the_last_message_is_noticed():
    pair = Pair()
    finished, _ = pair.client.finish(answered(pair.server, pair.client.hello()))
    for place in range(len(finished)):
        refusal(pair.server.accept, flipped(finished, place))
        assert pair.still_good()
    pair.server.accept(finished)


def test_messages_have_exact_lengths():
    pair = Pair()

    def refused(call, whole):
        for length in range(len(whole)):
            refusal(call, whole[:length])
        refusal(call, whole + b"\0")
        refusal(call, bytes(MAX_HELLO_BYTES + 1))

    hello = pair.client.hello()
    refused(pair.server.read, hello)
    pair.server.read(hello)
    answer = pair.server.answer()
    refused(pair.client.finish, answer)
    finished, _ = pair.client.finish(answer)
    refused(pair.server.accept, finished)
    pair.server.accept(finished)


@settings(max_examples=300)
@given(st.binary(max_size=MAX_HELLO_BYTES + 10), st.booleans(), st.integers(1, 3))
def test_any_bytes_are_refused_by_name(content, with_prefix, number):
    if with_prefix:
        content = b"CHLN" + bytes([HANDSHAKE_VERSION, number]) + content
    pair = _started()
    refusal(answered, ServerHandshake(pair.keys, pair.book), content)
    refusal(pair.client.finish, content)
    refusal(pair.server.accept, content)
    assert pair.still_good()


@functools.cache
def _started():
    pair = Pair()
    answered(pair.server, pair.client.hello())
    return pair


def test_the_longest_names_fit():
    identity = Identity("法" * 84 + "run", 2**32 - 1, "n" * 255)
    pair = Pair(identity=identity)
    hello = pair.client.hello()
    assert len(hello) == MAX_HELLO_BYTES
    assert pair.server.read(hello) == identity
    finished, _ = pair.client.finish(pair.server.answer())
    pair.server.accept(finished)


def test_names_cannot_be_empty_on_the_wire():
    pair = Pair()
    hello = pair.client.hello()
    assert hello[11:15] == b"\x03run"
    altered = hello[:11] + b"\x00" + hello[15:]
    assert refusal(answered, pair.server, altered) is Refusal.MALFORMED


def test_names_that_are_not_utf8_are_refused():
    pair = Pair()
    hello = pair.client.hello()
    assert refusal(answered, pair.server, hello[:12] + b"\xff" + hello[13:]) is Refusal.MALFORMED


def hello_with(pair, ticket, identity=COURT):
    return ClientHandshake(ticket, identity, pair.keys.public, pair.keys.suite).hello()


def test_tickets_that_are_no_good_are_named():
    pair = Pair()
    unknown = Ticket(bytes(16), bytes(32))
    assert refusal(answered, pair.server, hello_with(pair, unknown)) is Refusal.TICKET_UNKNOWN
    stolen = Ticket(pair.ticket.identifier, bytes(32))
    assert refusal(answered, pair.server, hello_with(pair, stolen)) is Refusal.AUTHENTICATION
    expired = pair.book.issue(COURT, 0)
    assert refusal(answered, pair.server, hello_with(pair, expired)) is Refusal.TICKET_EXPIRED
    used = pair.book.issue(COURT, 60)
    lane = pair.book.accept(used.identifier, unknown)
    pair.book.confirm(lane, unknown.identifier)
    assert refusal(answered, pair.server, hello_with(pair, used)) is Refusal.TICKET_USED
    assert pair.still_good()


@pytest.mark.parametrize(
    "identity", [Identity("ruin", 7, "court"), Identity("run", 8, "court"), Identity("run", 7, "c")]
)
def test_a_ticket_is_good_for_what_it_was_issued_for(identity):
    pair = Pair()
    hello = hello_with(pair, pair.ticket, identity)
    with pytest.raises(HandshakeError, match="different run, round or node"):
        answered(pair.server, hello)
    assert pair.still_good()


def test_a_handshake_under_way_survives_a_rotation():
    pair = Pair(keys=ServerKeys(HYBRID))
    answer = answered(pair.server, pair.client.hello())
    pair.keys.rotate()
    finished, mine = pair.client.finish(answer)
    assert pair.server.accept(finished)[0] == mine


def test_the_other_suite_is_refused_by_name():
    pair = Pair()
    hello = ClientHandshake(pair.ticket, COURT, keys_of("rsa-3072").public, "rsa-3072").hello()
    assert refusal(answered, pair.server, hello) is Refusal.SUITE


def test_the_mac_is_checked_before_any_public_key_work():
    class UnusedKeys(ServerKeys):
        def unwrap(self, *_):
            raise AssertionError("work for an outsider")

    pair = Pair(keys=UnusedKeys(HYBRID))
    hello = pair.client.hello()
    # With this share, the key agreement itself would be refused, as malformed.
    share = read_hello(hello).share
    assert hello.count(share) == 1
    hello = hello.replace(share, bytes(len(share)))
    assert refusal(answered, pair.server, hello) is Refusal.AUTHENTICATION


def test_an_eavesdropper_can_not_use_up_the_ticket():
    pair = Pair()
    hello = pair.client.hello()
    honest_answer = answered(pair.server, hello)
    eavesdropper = ServerHandshake(pair.keys, pair.book)
    # The same bytes again, and before the honest client is done.
    assert refusal(answered, eavesdropper, hello) is Refusal.BUSY
    finished, mine = pair.client.finish(honest_answer)
    assert pair.still_good()
    theirs, _ = pair.server.accept(finished)
    assert theirs == mine


def test_a_faster_eavesdropper_can_not_use_up_the_ticket():
    pair = Pair()
    hello = pair.client.hello()
    eavesdropper = ServerHandshake(pair.keys, pair.book)
    answered(eavesdropper, hello)
    assert refusal(answered, pair.server, hello) is Refusal.BUSY
    again = ClientHandshake(pair.ticket, COURT, pair.keys.public, pair.keys.suite)
    finished, mine = again.finish(answered(pair.server, again.hello()))
    assert refusal(eavesdropper.accept, finished) is Refusal.AUTHENTICATION
    theirs, _ = pair.server.accept(finished)
    assert theirs == mine


@pytest.mark.parametrize("share", [bytes(32), bytes([1]) + bytes(31)])
def test_a_share_that_gives_a_known_secret_is_refused(share):
    pair = Pair()
    hello = replace(read_hello(pair.client.hello()), share=share)
    wrapped = wrap(HYBRID, pair.keys.public, bytes(32), hello_context(hello))
    message = with_mac(pair, replace(hello, wrapped=wrapped))
    assert refusal(answered, pair.server, message) is Refusal.MALFORMED


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("place", ["ticket", "share", "round"])
def test_a_wrapped_secret_is_good_for_its_own_message_alone(suite, place):
    """Who has a ticket can't make the server open what another client has wrapped."""
    pair = Pair(suite)
    theirs = read_hello(pair.client.hello())
    identity = replace(COURT, round=8) if place == "round" else COURT
    if place != "share":
        pair.ticket = pair.book.issue(identity, 60)
    hello = replace(theirs, identity=identity, ticket=pair.ticket.identifier)
    if place == "share":
        hello = replace(hello, share=bytes([9]) + bytes(31))
    assert refusal(answered, pair.server, with_mac(pair, hello)) is Refusal.WRAPPED_SECRET


def test_nothing_secret_is_shown():
    pair = Pair()
    answer = answered(pair.server, pair.client.hello())
    finished, secrets = pair.client.finish(answer)
    pair.server.accept(finished)
    shown = repr(
        [
            pair.client,
            pair.server,
            pair.keys,
            pair.book,
            pair.ticket,
            secrets,
            vars(secrets)["resumption"],
        ]
    )
    for secret in (pair.ticket.secret, secrets.up, secrets.down, secrets.resumption.secret):
        for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
            assert form not in shown
