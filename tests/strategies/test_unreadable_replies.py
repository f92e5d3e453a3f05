"""Replies that the SuperLink accepts although they can't be read or name a different sender."""

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    validate_object_content,
)

from chambers.in_process import InProcessGrid
from strategies.participants import RefusedError
from tests.in_process import MemoryJournal
from tests.strategies.grids import NODES, start

BETA = 2
GARBAGE = add_header_to_object_body(b"\xff\xff", ConfigRecord())


def garbage(reply, contents):
    contents[reply.content["config"].object_id] = GARBAGE


def no_records(reply, contents):
    contents[reply.content.object_id] = ConfigRecord().deflate()


def no_message(reply, contents):
    contents[reply.object_id] = RecordDict().deflate()


def forged(reply, contents):
    identifier = reply.object_id
    reply.metadata.__dict__["_src_node_id"] = 1
    contents[identifier] = reply.deflate()


ODD = {
    garbage: "its reply can't be read (DecodeError)",
    no_records: "its reply can't be read (MessageInitializationError)",
    no_message: "its reply can't be read (AttributeError)",
    forged: "its reply names a different sender",
}


class StoredGrid(InProcessGrid):
    """Reads replies from objects, as a grid at a SuperLink does; beta's objects are invalid."""

    def __init__(self, values, kind, spoil):
        super().__init__(values, NODES)
        self._kind, self._spoil = kind, spoil

    def pull_messages(self, message_ids):
        return [self._read(reply) for reply in super().pull_messages(message_ids)]

    def _read(self, reply):
        contents = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
        identifier = reply.object_id
        if (reply.metadata.src_node_id, reply.metadata.message_type) == (BETA, self._kind):
            self._spoil(reply, contents)
        for content in contents.values():
            validate_object_content(content)  # as the SuperLink does
        message = inflate_object_from_contents(identifier, contents)
        message.metadata.__dict__["_message_id"] = identifier
        return message


@pytest.mark.parametrize("spoil", ODD, ids=lambda how: how.__name__)
def test_its_sender_is_left_out_by_name(values, tmp_path, spoil):
    own = values | {"state-path": str(tmp_path), "rounds": 1, "min-nodes": 2}
    journal = MemoryJournal()
    start(own, StoredGrid(own, "train", spoil), journal)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert event["participants"] == ["alpha", "gamma"]
    assert event["left_out"] == [{"client": "beta", "reason": ODD[spoil]}]


@pytest.mark.parametrize("spoil", ODD, ids=lambda how: how.__name__)
def test_at_registration_the_run_ends(values, tmp_path, spoil):
    own = values | {"state-path": str(tmp_path)}
    with pytest.raises(RefusedError) as error:
        start(own, StoredGrid(own, "query", spoil), MemoryJournal())
    assert str(error.value).splitlines()[1:] == [f"  a SuperNode without a name: {ODD[spoil]}"]
