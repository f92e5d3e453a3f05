"""Messages over a socket arrive whole, or with an error."""

import socket

import pytest

from split.framing import receive, send


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_arrive_whole_and_in_order(ends):
    one, other = ends
    for content in (b"", b"a", bytes(1000)):
        send(one, content)
    assert [bytes(receive(other)) for _ in range(3)] == [b"", b"a", bytes(1000)]


def test_a_message_may_be_as_long_as_agreed(ends):
    one, other = ends
    send(one, bytes(10))
    assert len(receive(other, 10)) == 10
    send(one, bytes(11))
    with pytest.raises(OSError, match="11 bytes, but at most 10"):
        receive(other, 10)


@pytest.mark.parametrize("sent", [b"", b"\0" * 7, (5).to_bytes(8), (5).to_bytes(8) + b"half"])
def test_an_incomplete_message_is_an_error(ends, sent):
    one, other = ends
    one.sendall(sent)
    one.close()
    with pytest.raises(ConnectionResetError, match="has closed"):
        receive(other)
