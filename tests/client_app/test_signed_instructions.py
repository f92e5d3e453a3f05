"""A site whose policy names the coordinator's key, and members that forge instructions."""

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from chambers.site.keys import write_pair
from federation.authentication import (
    INSTRUCTION,
    AuthenticationError,
    Signer,
    open_reply,
)
from federation.messages import ARRAYS, CONFIG
from federation.packed_content import EncryptedArrays
from federation.run_config import parse_run_config

SETTINGS = {"train.local-steps": 1}


def copied(message):
    return message_from_proto(message_to_proto(message))


class SignedSite:
    """A site that carries out only signed instructions."""

    def __init__(self, site):
        self.site, self.key = site, Ed25519PrivateKey.generate()
        write_pair(site.folder / "instructions", self.key)
        site.decide(f'instruction-key = "{site.folder / "instructions.pub"}"\n')
        self.config = parse_run_config(site.values | SETTINGS)
        self.signer = Signer(self.key, self.config)

    def signed(self, kind="train", signer=None, **instruction):
        message = self.site.message(kind, **instruction)
        return message, (signer or self.signer).sign(message, EncryptedArrays())

    def answer(self, message, statement, node=1):
        reply = self.site.send(copied(message), SETTINGS, node)
        open_reply(reply, statement)
        return reply

    def refusal(self, message, statement, node=1):
        """Return the reason for a refusal, which must be logged; no line may say ``accepted``."""
        count = len(self.site.lines("accepted"))
        problem = self.site.problem(self.answer(message, statement, node))
        assert len(self.site.lines("accepted")) == count
        assert self.site.lines("refused")[-1]["problem"] == problem
        return problem


@pytest.fixture
def signed_site(site):
    return SignedSite(site)


def test_an_instruction_is_carried_out_and_its_lines_name_it(signed_site):
    message, statement = signed_site.signed()
    reply = signed_site.answer(message, statement)
    assert reply.content[ARRAYS] and "problem" not in reply.content[CONFIG]
    about = {"nonce": statement.nonce, "digest": statement.digest}
    for event in ("instruction", "accepted", "reply"):
        (line,) = signed_site.site.lines(event)
        assert line.items() >= (about | {"run": "run-1", "round": 1, "kind": "train"}).items()


def test_an_unsigned_instruction_is_refused_and_logged(signed_site):
    problem = signed_site.site.refusal("evaluate", final=True)
    assert "not signed" in problem
    (line,) = signed_site.site.lines("refused")
    assert line["kind"] == "evaluate" and line["problem"] == problem
    assert not (signed_site.site.folder / "state").exists()


def test_an_instruction_signed_with_another_key_is_refused(signed_site):
    other = Signer(Ed25519PrivateKey.generate(), signed_site.config)
    message, statement = signed_site.signed(signer=other)
    assert "not signed with the coordinator's key" in signed_site.refusal(message, statement)
    assert len(signed_site.site.lines("refused")) == 1


def test_an_instruction_is_carried_out_once(signed_site):
    message, statement = signed_site.signed()
    signed_site.answer(message, statement)
    assert "received before" in signed_site.refusal(message, statement)


def test_an_instruction_for_another_institution_is_refused(signed_site):
    assert "for a different institution" in signed_site.refusal(*signed_site.signed(), node=2)


def test_an_instruction_of_another_run_or_kind_is_refused(signed_site):
    message, statement = signed_site.signed("query")
    message.metadata.message_type = "train"
    assert "for a different run or kind" in signed_site.refusal(message, statement)
    message = signed_site.site.message("query")
    message.metadata.__dict__["_run_id"] = 2
    statement = signed_site.signer.sign(message, EncryptedArrays())
    assert "for a different run or kind" in signed_site.refusal(message, statement)


def test_an_older_one_and_an_earlier_round_are_refused(signed_site):
    old, its_statement = signed_site.signed("query")
    signed_site.answer(*signed_site.signed("query", round=2))
    assert "signed before one that was already" in signed_site.refusal(old, its_statement)
    assert "an earlier round" in signed_site.refusal(*signed_site.signed("query", round=1))
    signed_site.answer(*signed_site.signed("query", round=1, lineage="run-2"))
    # A resumed run, which has another id, repeats rounds.
    log = signed_site.site.log
    log.write_text(log.read_text().replace('"run-id": "1"', '"run-id": "2"'))
    resumed = signed_site.answer(*signed_site.signed("query", round=1))
    assert "problem" not in resumed.content[CONFIG]
    # Another of the institution's SuperNodes, with the same log.
    signed_site.site.node["name"] = "tribunal"
    assert "problem" not in signed_site.answer(old, its_statement).content[CONFIG]


@pytest.mark.parametrize(
    ("seconds", "problem"),
    [(-900, "expired"), (900, "in the future"), (-450, None), (150, None)],
)
def test_an_instruction_of_another_time_is_refused(signed_site, monkeypatch, seconds, problem):
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + seconds)
        message = signed_site.site.message("query")
        message.metadata.ttl = 300.0
        statement = signed_site.signer.sign(message, EncryptedArrays())
    if problem:
        assert problem in signed_site.refusal(message, statement)
    else:
        assert "problem" not in signed_site.answer(message, statement).content[CONFIG]


def test_times_of_signing_increase_though_the_clock_stands(signed_site, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    times = [signed_site.signed("query")[1].time for _ in range(3)]
    assert times[0] < times[1] < times[2]


def change_array(message):
    record = message.content[ARRAYS]
    name = next(iter(record))
    array = record[name]
    data = bytes([array.data[0] ^ 1]) + array.data[1:]
    record[name] = Array(array.dtype, tuple(array.shape), array.stype, data)


def rename_array(message):
    record = dict(message.content[ARRAYS])
    record["another"] = record.pop(next(iter(record)))
    message.content[ARRAYS] = ArrayRecord(record)


def change_records(message):
    record = message.content[INSTRUCTION]
    record["records"] = record["records"][:-1] + bytes([record["records"][-1] ^ 1])


def drop_arrays(message):
    del message.content[ARRAYS]


@pytest.mark.parametrize("change", [change_array, rename_array, change_records, drop_arrays])
def test_all_of_its_content_is_signed(signed_site, change):
    message, statement = signed_site.signed()
    change(message)
    assert "differs from the signed content" in signed_site.refusal(message, statement)


@pytest.mark.parametrize("changed", [{"rounds": 4}, {"data.path": "/etc"}, {"unknown": 1}])
def test_the_run_config_is_signed(signed_site, changed):
    message, statement = signed_site.signed()
    reply = signed_site.site.send(copied(message), SETTINGS | changed)
    open_reply(reply, statement)
    assert "differs from the one that was signed" in signed_site.site.problem(reply)
    assert signed_site.site.lines("refused") and not signed_site.site.lines("accepted")


def test_its_statement_is_signed(signed_site):
    message, statement = signed_site.signed()
    later = statement.model_copy(update={"expires": statement.expires + 1})
    message.content[INSTRUCTION]["statement"] = later.model_dump_json().encode()
    assert "not signed with the coordinator's key" in signed_site.refusal(message, statement)


@pytest.mark.parametrize(
    "change", [{"records": None}, {"statement": b""}, {"statement": 1}, {"a": b""}]
)
def test_a_malformed_one_is_refused_and_logged(signed_site, change):
    message, _ = signed_site.signed()
    record = {**message.content[INSTRUCTION], **change}
    given = {key: value for key, value in record.items() if value is not None}
    message.content[INSTRUCTION] = ConfigRecord(given)
    problem = signed_site.site.problem(signed_site.site.send(message))
    (line,) = signed_site.site.lines("refused")
    assert "malformed" in problem and line["problem"] == problem


def test_nobody_else_can_make_the_reply(signed_site):
    message, statement = signed_site.signed()
    reply = signed_site.site.send(copied(message), SETTINGS)
    _, other = signed_site.signed()
    with pytest.raises(AuthenticationError, match="not from the recipient"):
        open_reply(copied(reply), other)
    change_array(reply)
    with pytest.raises(AuthenticationError, match="not from the recipient"):
        open_reply(reply, statement)


def test_no_object_of_a_message_can_be_predicted(signed_site):
    """A SuperLink stores objects under the digests of their contents."""

    def objects(message):
        return set(get_all_nested_objects(message))

    (one, _), (other, _) = signed_site.signed(), signed_site.signed()
    assert not objects(one) & objects(other)
    settings = SETTINGS | {"train.learning-rate": 0.0}
    replies = [signed_site.site.send(copied(message), settings) for message in (one, other)]
    assert not objects(replies[0]) & objects(replies[1])
