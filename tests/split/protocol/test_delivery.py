"""Deliveries: which frames are stored, sent and sent again after acknowledgements."""

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.delivery import Delivery
from split.protocol.errors import FrameError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.payload import Outgoing

LIMITS = Limits(8, "int8", 64)


def frame(number: int) -> Outgoing:
    """Return a frame whose tensor needs more memory than its payload, or less."""
    tensors = {"hidden": torch.zeros(1, 1 + number % 64, 8)}
    return Outgoing(Frame(Kind.HIDDEN, number, tensors=tensors), LIMITS)


def sent_frames(count: int, arrived: int = 0) -> Delivery:
    """Return a delivery that has sent some frames, the first of which have been acknowledged."""
    delivery = Delivery()
    for number in range(count):
        delivery.add(frame(number))
        delivery.next()
    delivery.acknowledge(arrived)
    return delivery


def numbers_sent(delivery: Delivery) -> list[int]:
    """Send all remaining frames; return their numbers."""
    return [outgoing.frame.step for outgoing in iter(delivery.next, None)]


class Network:
    """A sender, a receiver, and the streams between them, one after another."""

    def __init__(self) -> None:
        self.delivery = Delivery()
        self.added: list[Outgoing] = []
        self.under_way: list[Outgoing] = []
        self.arrived: list[int] = []

    def add(self, _: int) -> None:
        self.added.append(frame(len(self.added)))
        self.delivery.add(self.added[-1])

    def send(self, _: int) -> None:
        if (outgoing := self.delivery.next()) is not None:
            self.under_way.append(outgoing)

    def arrive(self, _: int) -> None:
        if self.under_way:
            self.arrived.append(self.under_way.pop(0).frame.step)

    def acknowledge(self, number: int) -> None:
        """Acknowledge all frames that have arrived, or fewer: acknowledgements take time."""
        late = number % (len(self.arrived) - self.delivery.acknowledged + 1)
        self.delivery.acknowledge(len(self.arrived) - late)

    def cut(self, _: int) -> None:
        self.under_way.clear()
        self.delivery.restart(len(self.arrived))

    def check(self) -> None:
        """Compare the counted bytes with the frames that must be stored."""
        kept = self.added[self.delivery.acknowledged :]
        unsent = self.added[len(self.arrived) + len(self.under_way) :]
        assert self.delivery.kept_bytes == sum(each.kept_bytes for each in kept)
        assert self.delivery.unsent_bytes == sum(each.kept_bytes for each in unsent)


ACTIONS = st.sampled_from(
    [Network.add, Network.send, Network.arrive, Network.acknowledge, Network.cut]
)


@settings(max_examples=60)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=80))
def test_every_frame_arrives_once_and_in_order_after_any_cuts(actions):
    network = Network()
    for action, number in actions:
        action(network, number)
        network.check()
    network.cut(0)
    network.arrived += numbers_sent(network.delivery)
    assert network.arrived == list(range(len(network.added)))
    network.delivery.acknowledge(len(network.arrived))
    assert (network.delivery.kept_bytes, network.delivery.unsent_bytes) == (0, 0)


@settings(max_examples=60)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("take", [Delivery.acknowledge, Delivery.restart])
def test_an_impossible_count_is_refused_and_changes_nothing(take, sent, had, unsent, count):
    had = min(had, sent)
    delivery = sent_frames(sent, had)
    for number in range(sent, sent + unsent):
        delivery.add(frame(number))
    before = (delivery.kept_bytes, delivery.unsent_bytes)
    if had <= count <= sent:
        take(delivery, count)
        assert delivery.acknowledged == count
        return
    with pytest.raises(FrameError, match=f"acknowledges {count} frames; it had acknowledged {had}"):
        take(delivery, count)
    assert delivery.acknowledged == had
    assert (delivery.kept_bytes, delivery.unsent_bytes) == before
    delivery.restart(had)
    assert numbers_sent(delivery) == list(range(had, sent + unsent))


def test_frames_of_an_earlier_stream_are_not_acknowledged_yet():
    delivery = sent_frames(3)
    delivery.restart(1)
    with pytest.raises(FrameError):
        delivery.acknowledge(2)
    delivery.next()
    delivery.acknowledge(2)


def test_dropping_what_is_unsent_keeps_what_was_sent():
    delivery = sent_frames(2)
    delivery.add(frame(2))
    delivery.drop_unsent()
    assert delivery.unsent_bytes == 0 < delivery.kept_bytes
    delivery.restart(0)
    assert numbers_sent(delivery) == [0, 1]


SMALL = {
    "nothing": ({}, {}),
    "WELCOME": ({}, {"credits": 4}),
    "STEP": ({}, {"factor": 0.5, "norm": 1.5}),
    "many fields": ({}, {f"field {number}": number * 1000 for number in range(50)}),
    "HIDDEN": ({"hidden": (1, 1, 8), "lengths": (1,)}, {"side": "left"}),
    "many tensors": ({f"tensor {number}": (1,) for number in range(50)}, {}),
}


@pytest.mark.parametrize("what", SMALL)
def test_small_frames_count_with_the_memory_of_their_objects(what):
    """A frame of 40 bytes takes up 700; ``tracemalloc`` doesn't see what PyTorch allocates."""
    shapes, fields = SMALL[what]
    limits = Limits(8, "float32", 64, average_bytes=2**20)
    kind = Kind[what] if what.isupper() else Kind.AVERAGE
    delivery = Delivery()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(300):
        tensors = {
            name: torch.ones(shape, dtype=torch.int32 if name == "lengths" else torch.float32)
            for name, shape in shapes.items()
        }
        made = {
            name: value + number / 7 if name != "side" else value for name, value in fields.items()
        }
        delivery.add(Outgoing(Frame(kind, 1000 + number, number, tensors, made), limits))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= delivery.kept_bytes <= 3.5 * taken


def test_nothing_is_kept_after_the_end():
    delivery = sent_frames(3, arrived=1)
    delivery.clear()
    assert delivery.next() is None
    assert (delivery.kept_bytes, delivery.unsent_bytes) == (0, 0)
