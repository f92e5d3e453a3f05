"""The row ledger, written by several messages at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from client_app.audit import AuditError
from client_app.row_ledger import record_rows
from federation.site_policy import SitePolicy


def test_messages_at_the_same_time_write_one_set_of_rows(tmp_path):
    digests = [bytes([number]) * 32 for number in range(100)]
    for attempt in range(20):
        policy = SitePolicy(**{"audit-log": str(tmp_path / str(attempt) / "audit.jsonl")})
        with ThreadPoolExecutor(8) as threads:
            names = list(threads.map(lambda _, p=policy: record_rows(p, digests), range(8)))
        assert len(set(names)) == 1
        assert len((policy.audit_file.parent / "rows" / names[0]).read_text().split()) == 100


def test_a_lost_key_is_not_replaced(tmp_path):
    policy = SitePolicy(**{"audit-log": str(tmp_path / "audit.jsonl")})
    record_rows(policy, [b"a" * 32])
    (tmp_path / "rows" / "key").unlink()
    with pytest.raises(AuditError, match=r"the row ledger's key .* is missing"):
        record_rows(policy, [b"b" * 32])
