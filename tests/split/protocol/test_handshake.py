import base64
import functools
import hashlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol import handshake as module
from split.protocol.errors import HandshakeError, Refusal, ServerKeyError, TicketError
from split.protocol.handshake import LONGEST_HELLO, ClientHandshake, ServerHandshake
from split.protocol.key_schedule import KeySchedule
from split.protocol.keys import WRAPPED_BYTES, ServerKeys
from split.protocol.tickets import Identity, Ticket, TicketBook

COURT = Identity("run", 7, "court")
HYBRID = "ml-kem-768-x25519"
SUITES = [HYBRID, "rsa-3072"]

# Made by an implementation of docs/wire.md that has hmac and hashlib alone: shared, wrapped and
# ticket's secret are 32 bytes of 0x11, 0x22 and 0x33; the ticket's identifier is 0, 1, …, 15; the
# client's share 0 … 31, the key's identifier 32 … 63, the server's share 64 … 95; the wrapped
# secret's bytes are i mod 251.
VECTORS = {
    HYBRID: {
        "hello_mac": "b79451ec6a4aa279493f6ee7463ee77a4adba25016dd4aff935c51c0445b158c",
        "server_finished": "a292b3fc5fc0c66c0887f41290169351cea68a68da28bcd2b1e585fed73f25b2",
        "client_finished": "57ab77a2048a235abf78a99d4907d7789ee25f17731be6f3c267a2d016285000",
        "transcript": "956ec2c668b88926e3427922a5a88c45cebeb6fab9eb207ae154fb3683f11aa7",
        "up": "f42192caccfcde01bfa3f8f4ec7a9cf3b3da7e7df1f8197de7ca05de9936062d",
        "down": "1eaf6c6226908f71f1f90b9858606f08c2b85fbc419b64ec9d8224f82caca19a",
        "resumption_identifier": "afc5006a0c85557afa8ac2361f355d05",
        "resumption_secret": "47eb574b3b3ef44a5fc515a3f730447c211141613302adf13f3abe018da8bf07",
    },
    "rsa-3072": {
        "hello_mac": "f622021bd4f26a22d12c595736048196e061354142c76685584c766d8c501085",
        "server_finished": "a005180e56305a3290b9c211c316d8e3df5660e05886ff8425be72ca40549a46",
        "client_finished": "5bbb7746ad2f970ed016f63b6a37f46b9c058c55c2052672ed1e7485132a26ae",
        "transcript": "499b69309b91eb971e3efda10923e64102540fab10795341182c3fb98f052eb6",
        "up": "7c00ce5ef3648da4ce87fddc70c36f095c2c69f6f895bfe8245f9b27c5d6d17a",
        "down": "550c4019a5c8820745a62f801313ba85914e88c089526dc43def3c90c98d36c3",
        "resumption_identifier": "1f2337d62c0a96449f90b5a2a95003ef",
        "resumption_secret": "3f5c3b7e80462604f10027550194042721daf0261dc101b02f2d004c1a70dd45",
    },
}


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


def refusal(call, *arguments):
    with pytest.raises(HandshakeError) as raised:
        call(*arguments)
    return raised.value.refusal


def flipped(message, place):
    return message[:place] + bytes([message[place] ^ 0x01]) + message[place + 1 :]


@pytest.mark.parametrize("suite", SUITES)
def test_both_sides_have_the_same_keys(suite):
    pair = Pair(suite)
    finished, mine = pair.client.finish(pair.server.answer(pair.client.hello()))
    assert pair.still_good()
    theirs, identity = pair.server.accept(finished)
    assert (mine, identity) == (theirs, COURT)
    assert len({mine.up, mine.down, mine.resumption.secret, pair.ticket.secret}) == 4
    assert refusal(pair.book.find, pair.ticket.identifier) is Refusal.TICKET_USED


def test_no_two_lanes_have_the_same_keys():
    secrets = []
    for _ in range(2):
        pair = Pair()
        secrets.append(pair.client.finish(pair.server.answer(pair.client.hello()))[1])
    assert secrets[0].up != secrets[1].up


@pytest.mark.parametrize("suite", SUITES)
def test_every_altered_byte_of_the_hello_is_noticed(suite):
    pair = Pair(suite)
    hello = pair.client.hello()
    named = dict.fromkeys((0, 1, 2, 3, 5, 11, 15), Refusal.MALFORMED)  # 11 and 15 are lengths
    named |= {4: Refusal.VERSION, 6: Refusal.SUITE}
    named |= dict.fromkeys(range(21, 37), Refusal.TICKET_UNKNOWN)
    for place in range(len(hello)):
        found = refusal(pair.server.answer, flipped(hello, place))
        assert found is named.get(place, Refusal.AUTHENTICATION)
    assert pair.still_good()
    finished, _ = pair.client.finish(pair.server.answer(hello))
    pair.server.accept(finished)


def test_every_altered_byte_of_the_answer_is_noticed():
    pair = Pair()
    answer = pair.server.answer(pair.client.hello())
    named = dict.fromkeys((0, 1, 2, 3, 5), Refusal.MALFORMED) | {4: Refusal.VERSION}
    for place in range(len(answer)):
        found = refusal(pair.client.finish, flipped(answer, place))
        assert found is named.get(place, Refusal.AUTHENTICATION)
    assert pair.still_good()


def test_every_altered_byte_of_the_last_message_is_noticed_and_leaves_the_ticket():
    pair = Pair()
    finished, _ = pair.client.finish(pair.server.answer(pair.client.hello()))
    for place in range(len(finished)):
        refusal(pair.server.accept, flipped(finished, place))
        assert pair.still_good()
    pair.server.accept(finished)


@pytest.mark.parametrize("message", [1, 2, 3])
def test_messages_have_exact_lengths(message):
    pair = Pair()
    hello = pair.client.hello()
    calls, sound = [pair.server.answer], [hello]
    calls.append(pair.client.finish)
    sound.append(pair.server.answer(hello))
    calls.append(pair.server.accept)
    sound.append(pair.client.finish(sound[1])[0])
    call, whole = calls[message - 1], sound[message - 1]
    for length in range(len(whole)):
        refusal(call, whole[:length])
    refusal(call, whole + b"\0")
    refusal(call, bytes(LONGEST_HELLO + 1))
    assert pair.still_good()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=LONGEST_HELLO + 10), st.booleans(), st.integers(1, 3))
def test_any_bytes_are_refused_by_name(content, with_prefix, number):
    if with_prefix:
        content = b"CHLN\x01" + bytes([number]) + content
    pair = _started()
    refusal(ServerHandshake(pair.keys, pair.book).answer, content)
    refusal(pair.client.finish, content)
    refusal(pair.server.accept, content)
    assert pair.still_good()


@functools.cache
def _started():
    pair = Pair()
    pair.server.answer(pair.client.hello())
    return pair


def test_the_longest_names_fit():
    identity = Identity("法" * 84 + "run", 2**32 - 1, "n" * 255)
    pair = Pair(identity=identity)
    hello = pair.client.hello()
    assert len(hello) == LONGEST_HELLO
    finished, _ = pair.client.finish(pair.server.answer(hello))
    assert pair.server.accept(finished)[1] == identity


def test_names_cannot_be_empty_on_the_wire():
    pair = Pair()
    hello = pair.client.hello()
    assert hello[11:15] == b"\x03run"
    altered = hello[:11] + b"\x00" + hello[15:]
    assert refusal(pair.server.answer, altered) is Refusal.MALFORMED


def test_names_that_are_not_utf8_are_refused():
    pair = Pair()
    hello = pair.client.hello()
    assert refusal(pair.server.answer, hello[:12] + b"\xff" + hello[13:]) is Refusal.MALFORMED


def hello_with(pair, ticket, identity=COURT):
    return ClientHandshake(ticket, identity, pair.keys.public, pair.keys.suite).hello()


def test_tickets_that_are_no_good_are_named():
    pair = Pair()
    unknown = Ticket(bytes(16), bytes(32))
    assert refusal(pair.server.answer, hello_with(pair, unknown)) is Refusal.TICKET_UNKNOWN
    stolen = Ticket(pair.ticket.identifier, bytes(32))
    assert refusal(pair.server.answer, hello_with(pair, stolen)) is Refusal.AUTHENTICATION
    expired = pair.book.issue(COURT, 0)
    assert refusal(pair.server.answer, hello_with(pair, expired)) is Refusal.TICKET_EXPIRED
    used = pair.book.issue(COURT, 60)
    pair.book.spend(used.identifier)
    assert refusal(pair.server.answer, hello_with(pair, used)) is Refusal.TICKET_USED
    assert pair.still_good()


@pytest.mark.parametrize(
    "identity", [Identity("ruin", 7, "court"), Identity("run", 8, "court"), Identity("run", 7, "c")]
)
def test_a_ticket_is_good_for_what_it_was_issued_for(identity):
    pair = Pair()
    hello = hello_with(pair, pair.ticket, identity)
    with pytest.raises(TicketError, match="another run, round or node"):
        pair.server.answer(hello)
    assert pair.still_good()


def test_a_hello_for_the_old_key_is_refused_by_name():
    pair = Pair(keys=ServerKeys(HYBRID))
    hello = pair.client.hello()
    pair.keys.rotate()
    with pytest.raises(ServerKeyError, match="server's key has changed"):
        pair.server.answer(hello)
    assert pair.still_good()


def test_a_handshake_under_way_survives_a_rotation():
    pair = Pair(keys=ServerKeys(HYBRID))
    answer = pair.server.answer(pair.client.hello())
    pair.keys.rotate()
    finished, mine = pair.client.finish(answer)
    assert pair.server.accept(finished)[0] == mine


def test_the_other_suite_is_refused_by_name():
    pair = Pair()
    hello = ClientHandshake(pair.ticket, COURT, keys_of("rsa-3072").public, "rsa-3072").hello()
    assert refusal(pair.server.answer, hello) is Refusal.SUITE


def test_the_mac_is_checked_before_any_public_key_work(monkeypatch):
    pair = Pair()
    hello = pair.client.hello()

    def fail(*_):
        raise AssertionError("work for a stranger")

    monkeypatch.setattr(ServerKeys, "unwrap", fail)
    monkeypatch.setattr(module, "_agree", fail)
    assert refusal(pair.server.answer, flipped(hello, 1000)) is Refusal.AUTHENTICATION


def test_who_heard_everything_can_neither_finish_nor_use_the_ticket_up():
    pair = Pair()
    hello = pair.client.hello()
    honest_answer = pair.server.answer(hello)
    eavesdropper = ServerHandshake(pair.keys, pair.book)
    # The same bytes again, and before the honest client is done.
    assert refusal(eavesdropper.answer, hello) is Refusal.BUSY
    finished, mine = pair.client.finish(honest_answer)
    assert pair.still_good()
    theirs, _ = pair.server.accept(finished)
    assert theirs == mine
    assert refusal(ServerHandshake(pair.keys, pair.book).answer, hello) is Refusal.TICKET_USED


def test_who_gets_there_before_the_honest_client_can_neither_finish_nor_use_the_ticket_up():
    pair = Pair()
    hello = pair.client.hello()
    eavesdropper = ServerHandshake(pair.keys, pair.book)
    eavesdropper.answer(hello)
    assert refusal(pair.server.answer, hello) is Refusal.BUSY
    again = ClientHandshake(pair.ticket, COURT, pair.keys.public, pair.keys.suite)
    finished, mine = again.finish(pair.server.answer(again.hello()))
    assert refusal(eavesdropper.accept, finished) is Refusal.AUTHENTICATION
    theirs, _ = pair.server.accept(finished)
    assert theirs == mine


def test_of_two_handshakes_with_one_ticket_one_is_finished():
    pair = Pair()
    servers = [ServerHandshake(pair.keys, pair.book) for _ in range(4)]
    lasts = []
    for server in servers:
        client = ClientHandshake(pair.ticket, COURT, pair.keys.public, pair.keys.suite)
        lasts.append(client.finish(server.answer(client.hello()))[0])
    outcomes = []

    def accept(server, last):
        try:
            server.accept(last)
            outcomes.append("accepted")
        except TicketError as error:
            outcomes.append(error.refusal)

    threads = [
        threading.Thread(target=accept, args=pair_) for pair_ in zip(servers, lasts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["accepted"] + [Refusal.TICKET_USED] * 3


@pytest.mark.parametrize("share", [bytes(32), bytes([1]) + bytes(31)])
def test_a_share_that_gives_a_known_secret_is_refused(share):
    pair = Pair()
    hello = module._Hello(
        suite=1,
        identity=COURT,
        ticket=pair.ticket.identifier,
        share=share,
        key=pair.keys.identifier,
        wrapped=module.wrap(HYBRID, pair.keys.public, bytes(32)),
    )
    body = module._write_hello(hello)
    message = body + module._hello_mac(pair.ticket, body)
    assert refusal(pair.server.answer, message) is Refusal.MALFORMED


@pytest.mark.parametrize("suite", SUITES)
def test_the_bytes_and_keys_are_those_of_the_document(suite):
    expected = VECTORS[suite]
    ticket = Ticket(bytes(range(16)), bytes([0x33]) * 32)
    hello = module._Hello(
        suite=SUITES.index(suite) + 1,
        identity=COURT,
        ticket=ticket.identifier,
        share=bytes(range(32)),
        key=bytes(range(32, 64)),
        wrapped=bytes(i % 251 for i in range(WRAPPED_BYTES[suite])),
    )
    first = module._write_hello(hello)
    first += module._hello_mac(ticket, first)
    schedule = KeySchedule(bytes([0x11]) * 32, bytes([0x22]) * 32, ticket.secret)
    second = module._prefix(2) + bytes(range(64, 96))
    second += schedule.server_finished(first + second)
    third = module._prefix(3)
    third += schedule.client_finished(first + second + third)
    whole = first + second + third
    secrets = schedule.secrets(whole)
    assert expected == {
        "hello_mac": first[-32:].hex(),
        "server_finished": second[-32:].hex(),
        "client_finished": third[-32:].hex(),
        "transcript": hashlib.sha256(whole).hexdigest(),
        "up": secrets.up.hex(),
        "down": secrets.down.hex(),
        "resumption_identifier": secrets.resumption.identifier.hex(),
        "resumption_secret": secrets.resumption.secret.hex(),
    }
    assert module._read_hello(first) == hello


def test_nothing_secret_is_shown():
    pair = Pair()
    answer = pair.server.answer(pair.client.hello())
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
