"""A changed audit log is noticed, from the log alone or from what a coordinator has recorded."""

import random

import pytest

from client_app.audit import AuditError, AuditLog
from client_app.audit_report import audit

COUNT = 30


@pytest.fixture
def log(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(COUNT):
        log.append({"event": "reply", "run": "run-1", "round": number, "kind": "train"})
    return log


def change(lines, at):
    lines[at] = lines[at].replace(b'"train"', b'"query"')


def remove(lines, at):
    del lines[at]


def insert(lines, at):
    lines.insert(at, b'{"event": "reply"}\n')


def repeat(lines, at):
    lines.insert(at, lines[at])


def swap(lines, at):
    lines[at - 1], lines[at] = lines[at], lines[at - 1]


def damage(lines, at):
    lines[at] = lines[at][:20] + b"\n"


@pytest.mark.parametrize("alter", [change, remove, insert, repeat, swap, damage])
def test_the_log_alone_shows_altered_lines(log, alter):
    assert not audit(log).problems
    content = log.path.read_bytes().splitlines(keepends=True)
    at = random.Random(alter.__name__).randrange(1, COUNT - 1)
    alter(content, at)
    log.path.write_bytes(b"".join(content))
    assert audit(log).problems
    log.append({"event": "later"})  # a later line doesn't hide it
    assert audit(log).problems


def test_a_record_shows_a_changed_end_and_a_restored_log(log):
    whole = log.path.read_bytes()
    recorded = [(audit(log).lines, audit(log).digest)]
    assert not audit(log, recorded).problems
    lines = whole.splitlines(keepends=True)
    for content in (whole[: whole.rindex(b"{")], b"", b"".join(lines[:5])):
        log.path.write_bytes(content)
        (problem,) = audit(log, recorded).problems
        assert f"a coordinator has recorded line {COUNT}, but the log ends" in problem
    while audit(log).lines < COUNT:  # a copy was restored, and continued
        log.append({"event": "reply"})
    (problem,) = audit(log, recorded).problems
    assert f"line {COUNT} with another digest" in problem
    # A record of the new log doesn't hide that of the old one.
    (problem,) = audit(log, [*recorded, (audit(log).lines, audit(log).digest)]).problems
    assert f"line {COUNT} with another digest" in problem


def test_rotated_files_are_one_log(log):
    log.path.rename(log.path.with_name("audit.jsonl.2"))
    log.append({"event": "reply", "run": "run-2"})
    with log.path.open("a") as file:
        file.write('{"event": "ha')  # a power failure, after which the file was rotated
    log.path.rename(log.path.with_name("audit.jsonl-2026-11-28"))
    log.path.with_name("audit.jsonl.bak").write_text("a copy, which counts for nothing\n")
    number, digest = log.append({"event": "reply", "run": "run-3"})
    assert number == COUNT + 2
    found = audit(log, [(number, digest)])
    assert not found.problems and set(found.runs) == {"run-1", "run-2", "run-3"}
    assert len(list(log.lines())) == COUNT + 2
    packed = log.path.with_name("audit.jsonl.2").rename(log.path.with_name("audit.jsonl.2.gz"))
    with pytest.raises(AuditError, match=f"{packed} is a part of the audit log"):
        list(log.lines())  # from the rest, a policy's limits would begin anew
    packed.rename(log.path.with_name("audit.jsonl.2"))
    log.path.with_name("audit.jsonl.2").unlink()
    assert f"line {COUNT + 1} follows line 0" in audit(log).problems[0]
