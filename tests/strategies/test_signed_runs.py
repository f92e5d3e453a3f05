"""Runs with signed instructions, at a SuperLink to which anyone can send arbitrary objects."""

from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.grid import HttpGrid

from federation.authentication import REPLY, SignedInstruction, Signer, signer_of
from federation.messages import ARRAYS, CONFIG, make_reply, problem_of, to_arrays
from federation.run_config import ConfigError, parse_run_config
from strategies.exchange import exchange
from tests.in_process import MemoryJournal
from tests.marks import nightly
from tests.strategies.grids import SpyingGrid, same, start


def events(journal):
    timed = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in event.items() if k not in timed} for event in journal.events]


def run(values, folder, change=lambda reply: reply, signer=None):
    own = values | {"state-path": str(folder)}
    journal = MemoryJournal()
    start(own, SpyingGrid(own, change), journal, signer=signer)
    return journal


@pytest.fixture
def signer(values):
    return Signer(Ed25519PrivateKey.generate(), parse_run_config(values))


def test_a_signed_run_trains_the_same(values, tmp_path, signer):
    own = values | {"strategy": "fedjudge-cl", "rounds": 2}
    authenticated = []

    def see(reply):
        authenticated.append(REPLY in reply.content)
        return reply

    signed = run(own, tmp_path / "signed", see, signer)
    plain = run(own, tmp_path / "plain")
    assert all(authenticated) and len(authenticated) == 3 * (1 + 1 + 2 + 2)
    assert events(signed) == events(plain)
    assert all(same(signed.adapters[n], plain.adapters[n]) for n in plain.adapters)


@pytest.mark.parametrize("forged", ["unauthenticated", "another's", "changed"])
def test_a_reply_in_the_name_of_another_is_left_out(values, tmp_path, signer, forged):
    """An attacker who stores a reply in a client's name doesn't know the instruction's secret."""
    kept = []

    def change(reply):
        if reply.metadata.message_type != MessageType.TRAIN:
            return reply
        kept.append(reply.content)
        if reply.metadata.src_node_id == 2:
            if forged == "unauthenticated":
                reply.content = RecordDict({CONFIG: ConfigRecord({"name": "beta", "problem": "p"})})
            elif forged == "another's":
                reply.content = kept[0]
            else:
                record = reply.content[REPLY]
                record["records"] = record["records"] + b"\x0a\x00"
        return reply

    journal = run(values | {"rounds": 1, "min-nodes": 2}, tmp_path, change, signer)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert event["participants"] == ["alpha", "gamma"]
    (left_out,) = event["left_out"]
    reason = {
        "unauthenticated": "its reply is refused: it isn't authenticated; it says: p",
        "another's": "its reply is refused: it is not from the recipient of the instruction, "
        "or was changed",
    }
    expected = {"client": "beta", "reason": reason.get(forged, reason["another's"])}
    assert left_out == expected


class SuperLink:
    """A SuperLink with Flower's own store of objects; its clients answer at once.

    The SuperLink refuses all messages to the clients in ``refuses``. For those in ``blocks``, an
    attacker blocks the objects of the first message. ``spoil`` changes the second client's reply.
    """

    def __init__(self, folder, refuses=(), blocks=(), spoil=lambda reply: None):
        self.spoil = spoil
        self.store = SqlObjectStore(str(folder / "superlink.db"))
        self.store.initialize()
        self.messages, self.refuses = {}, refuses
        self.blocks, self.blocked = set(blocks), set()

    def announce(self, tree):
        """Announce an object, as any SuperNode can with a message to itself."""
        return self.store.preregister(1, tree)

    def PushMessages(self, request):  # noqa: N802 - Flower's names
        wanted = []
        try:
            for each, tree in zip(request.messages_list, request.message_object_trees, strict=True):
                node, objects = each.metadata.dst_node_id, iterate_object_tree(tree)
                objects = {one.object_id for one in objects}
                if node in self.blocks:
                    self.blocks.remove(node)
                    self.blocked |= objects
                if node in self.refuses or objects & self.blocked:
                    raise ValueError("refused")
                wanted += self.announce(tree)
                self.messages[each.metadata.message_id] = tree
        except ValueError as error:
            response = httpx.Response(500, request=httpx.Request("POST", "http://superlink"))
            raise httpx.HTTPStatusError("500", request=response.request, response=response) from (
                error
            )
        identifiers = [each.metadata.message_id for each in request.messages_list]
        return PushAppMessagesResponse(message_ids=identifiers, objects_to_push=wanted)

    def PushObject(self, request):  # noqa: N802
        self.store.put(request.object_id, request.object_content)
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):  # noqa: N802
        (identifier,) = request.message_ids
        tree = self.messages[identifier]
        contents = {t.object_id: self.store.get(t.object_id) for t in iterate_object_tree(tree)}
        asked = inflate_object_from_contents(identifier, contents)
        asked.metadata.__dict__["_message_id"] = identifier
        node = asked.metadata.dst_node_id
        instruction = SignedInstruction.of(asked.content)
        reply = make_reply(asked, {"name": str(node)})
        reply.metadata.__dict__["_src_node_id"] = node
        if instruction:
            asked.content = instruction.content()
            assert asked.content[CONFIG]["round"] == 1
            instruction.authenticate(reply)
        if node == 2:
            self.spoil(reply)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        found = get_all_nested_objects(reply)
        self.store.preregister(1, get_object_tree(reply))
        for name, each in found.items():
            self.store.put(name, each.deflate())
        # Someone has stored a message to the ServerApp, which the SuperLink adds to any reply.
        unasked = Message(RecordDict(), 1, MessageType.QUERY)
        unasked.metadata.__dict__["_message_id"] = unasked.object_id
        both = (unasked, reply)
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(each)) for each in both],
            message_object_trees=[get_object_tree(each) for each in both],
        )

    def PullObject(self, request):  # noqa: N802
        content = self.store.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request):  # noqa: N802
        return ConfirmMessageReceivedResponse()


@pytest.fixture
def ask(one_run):
    def ask(superlink, signer, arrays):
        grid = HttpGrid(token="token")
        grid._client, grid._run = superlink, SimpleNamespace(run_id=1)
        content = {CONFIG: ConfigRecord({"round": 1}), ARRAYS: arrays}
        messages = [
            Message(RecordDict(dict(content)), node, MessageType.TRAIN, ttl=60.0)
            for node in (1, 2, 3)
        ]
        replies = list(exchange(grid, messages, timeout=30.0, signer=signer))
        return {reply.metadata.src_node_id: problem_of(reply) for reply in replies}

    return ask


def test_objects_that_someone_has_announced_end_no_run(ask, signer, tmp_path):
    """An institution announces predictable objects of an instruction, with other children."""
    arrays = to_arrays({"lora_A": torch.arange(6.0).reshape(2, 3)})
    instruction = ConfigRecord({"round": 1})
    predicted = get_all_nested_objects(RecordDict({CONFIG: instruction, ARRAYS: arrays}))
    superlink = SuperLink(tmp_path)
    other = ObjectTree(object_id=64 * "0")
    for name in predicted:
        superlink.announce(ObjectTree(object_id=name, children=[other]))
    refused = "the message to it could not be sent"
    assert ask(superlink, None, arrays) == dict.fromkeys((1, 2, 3), refused)
    assert ask(superlink, signer, arrays) == dict.fromkeys((1, 2, 3))


def test_a_client_whose_message_is_refused_is_left_out(ask, signer, tmp_path):
    superlink = SuperLink(tmp_path, refuses={2})
    answers = ask(superlink, signer, to_arrays({"lora_A": torch.ones(2, 3)}))
    assert answers == {1: None, 2: "the message to it could not be sent", 3: None}


def test_a_blocked_message_is_sent_with_other_objects(ask, signer, tmp_path):
    superlink = SuperLink(tmp_path, blocks={2})
    assert ask(superlink, signer, to_arrays({"lora_A": torch.ones(2, 3)})) == {
        1: None,
        2: None,
        3: None,
    }


def test_equal_arrays_are_stored_once(ask, signer, tmp_path):
    """The adapter is sent to every client, but stored once in the SuperLink's database."""
    superlink = SuperLink(tmp_path)
    ask(superlink, signer, to_arrays({f"lora_{n}": torch.ones(2, 3) for n in range(5)}))
    # Each client has a message, records and a record of bytes; all share arrays and chunks.
    replies, requests, shared = 3 * 3, 3 * 3, 1 + 5 * 2
    assert len(superlink.store) == replies + requests + shared


def large(reply):
    reply.content[ARRAYS] = ArrayRecord([np.zeros(2**20 + n, np.float32) for n in range(18)])


def repeated_pieces(reply):
    reply.content[ARRAYS] = ArrayRecord([np.zeros(1000, np.uint8)])
    (array,) = reply.content[ARRAYS].values()
    array.__dict__["_chunks"] = array.slice_array() * 100_000


def a_large_piece(reply):
    reply.content[ARRAYS] = ArrayRecord([np.zeros(6 * 2**20, np.uint8)])
    (array,) = reply.content[ARRAYS].values()
    piece = ArrayChunk(memoryview(array.data))
    array.__dict__["_chunks"] = [(piece.object_id, piece)]


def many_names(reply):
    array = Array(np.zeros(2**20, np.float32))
    reply.content[ARRAYS] = ArrayRecord({str(n): array for n in range(20)})


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, nightly(False)])
@pytest.mark.parametrize(
    "spoil",
    [
        *(large, many_names),
        *(nightly(each) for each in (repeated_pieces, a_large_piece)),
    ],
)
def test_a_reply_that_fills_the_memory_is_left_out(ask, signer, tmp_path, spoil, signed):
    superlink = SuperLink(tmp_path, spoil=spoil)
    answers = ask(superlink, signer if signed else None, to_arrays({"lora_A": torch.ones(2, 3)}))
    assert answers == {1: None, 2: "its reply is larger than 64 MiB", 3: None}


def test_a_deployment_without_key_is_refused():
    grid = HttpGrid(token="token")
    with pytest.raises(ConfigError, match="must be signed"):
        signer_of(parse_run_config({}), grid)
    assert signer_of(parse_run_config({"instruction-key": "none"}), grid) is None
