"""The clients' audit logs, as far as the coordinator can vouch for them.

A reply contains the number and the digest of the line that records it in the client's audit log.
The digest depends on all earlier lines, so with the coordinator's record, ``chambers site audit``
notices a log that was shortened or replaced.
"""

from logging import WARNING

from flwr.app import Message
from flwr.common import log

from federation.messages import audit_of
from strategies.journal import Journal


class AuditedReplies:
    """Records in the journal which line of a client's audit log records each reply."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._last: dict[str, int] = {}

    def record(self, reply: Message, client: str, is_late: bool) -> None:
        """Record a reply's line; warn if an earlier reply of the run had a later line.

        A late reply may have an earlier line than one that was pulled before.
        """
        found = audit_of(reply)
        if found is None:
            return
        line, digest = found
        before = self._last.get(client, 0)
        self._last[client] = max(before, line)
        if line <= before and not is_late:
            text = "%s: its audit log was lost or restored: line %d follows line %d"
            log(WARNING, text, client, line, before)
        self._journal.record({"event": "audit", "client": client, "line": line, "digest": digest})
