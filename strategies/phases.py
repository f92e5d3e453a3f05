"""The phases in which clients train or evaluate: send their messages, and check the replies."""

import math
from collections.abc import Callable, Iterable, Iterator
from logging import WARNING

from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import Signer
from federation.messages import ARRAYS, CONFIG, Instruction, audit_of, from_arrays, to_arrays
from federation.run_config import RunConfig
from federation.run_folder import LaneStatus, Phase, RunStatus
from federation.sums.announcement import GROUP, group_record
from finetuning.adapters.adapter import State
from finetuning.aggregation.mixed_ranks import cut
from strategies.exchange import Unanswered, exchange, turns
from strategies.journal import Journal, LiveStatus
from strategies.masked_sums import GroupMeans, MaskedSums
from strategies.participants import Participants
from strategies.registration import Participant
from strategies.replies import Replies

# Time to wait for the rest of a late reply that is being pulled.
_LATE_SECONDS = 60.0


class Phases:
    """Exchanges each phase's messages, and keeps the run's status up to date."""

    def __init__(
        self,
        config: RunConfig,
        participants: Participants,
        journal: Journal,
        signer: Signer | None,
    ) -> None:
        self._config = config
        self._participants = participants
        self._journal = journal
        self._signer = signer
        self._sums: MaskedSums | None = None  # of the clients that were asked last
        self.status = LiveStatus(journal, config.rounds)
        # With ``late-replies``, the messages of the last training without a reply.
        self._late: Unanswered | None = None
        self._audit_lines: dict[str, int] = {}  # each client's last line of its audit log

    def begin(
        self, phase: Phase, instruction: Instruction, arrays: ArrayRecord, grid: Grid, draw: int
    ) -> Iterator[Message]:
        """Start a phase, and create a message for each client that takes part.

        Phases with equal ``draw`` have the same clients. Each message contains the instruction,
        ``arrays`` at the client's rank and, with masked sums, the announcements of its group.
        """
        kind = MessageType.TRAIN if phase == "training" else MessageType.EVALUATE
        content = RecordDict({ARRAYS: arrays, CONFIG: instruction.to_record()})
        messages = self._participants.address(kind, content, grid, draw)
        asked, groups = self._participants.asked, self._participants.groups
        absent = self._participants.missing(asked)
        status = RunStatus(phase=phase, round=instruction.round, asked=list(asked), left_out=absent)
        self.status.begin(status, self._config.reply_timeout * turns(grid, len(asked)))
        if self._config.sums.enabled:
            self._sums = MaskedSums(self._config, groups)

        def adapted() -> Iterator[Message]:
            by_rank: dict[int, ArrayRecord] = {}  # clients of equal rank share one record
            for message in messages:
                client = self._participants.recipient_of(message)
                if group := groups.get(client.name):
                    message.content[GROUP] = group_record(list(group.announcements.values()))
                if rank := client.rank:
                    if rank not in by_rank:
                        by_rank[rank] = to_arrays(cut(from_arrays(arrays), rank))
                    message.content[ARRAYS] = by_rank[rank]
                yield message

        return adapted()

    def exchange(
        self,
        messages: Iterable[Message],
        grid: Grid,
        timeout: float,
        training: bool,
        array_bytes: int,
        lanes: Callable[[], list[LaneStatus]],
    ) -> Iterator[Message]:
        """Send train or evaluate messages to all clients at once, and yield replies.

        ``array_bytes`` is the expected size of a reply's arrays. ``lanes`` returns the clients'
        progress within the round.
        """
        unanswered = Unanswered(grid)
        if training and self._config.late_replies:
            self._late = unanswered
        return exchange(
            grid=grid,
            messages=messages,
            timeout=timeout,
            signer=self._signer,
            array_bytes=array_bytes,
            on_poll=lambda: self.status.refresh(lanes),
            unanswered=unanswered,
            silent=self._participants.silent(grid),
        )

    def late_replies(self) -> Iterator[Message]:
        """Yield the replies to the last training that have arrived since."""
        if self._late:
            yield from self._late.poll(_LATE_SECONDS)

    def collect(
        self,
        collected: Replies,
        replies: Iterable[Message],
        base: str,
        reference: ArrayRecord | None,
        are_late: bool = False,
        evaluation: Instruction | None = None,
    ) -> None:
        """Check replies as they arrive; release each reply's memory before the next one is pulled.

        ``collected`` receives the valid replies, and the reasons for leaving out other clients.
        ``base`` is the digest of the base model. ``reference`` contains the required names and
        shapes of arrays (for all ranks, and before masking); None for replies without arrays.
        ``evaluation`` is the instruction of an evaluation, whose arrays are the importance J.
        """
        # A negative J would push weights away from the global weights.
        minimum = 0.0 if evaluation else -math.inf
        for reply in replies:
            if sender := self._participants.sender_of(reply):
                expected = self._expected(sender, reference, evaluation)
                self._record_audit(reply, sender.name, are_late)
                answers = self._config.evaluate.shown
                reason = collected.add(reply, sender, base, expected, minimum, answers)
                if not are_late:
                    self.status.add(sender.name, reason)
            del reply  # release its memory before the next reply is pulled
        if not are_late:
            answered = {*collected.metrics, *collected.left_out}
            collected.left_out |= self._participants.missing(answered)
        collected.sort()
        for name, reason in collected.left_out.items():
            log(WARNING, "%s is left out: %s", name, reason)

    def open_sums(self, replies: Replies, reference: State | None) -> GroupMeans | None:
        """With masked sums, return the means of groups; leave out the others' members."""
        if self._sums is None:
            return None
        means = self._sums.open(replies, reference)
        for name, reason in replies.left_out.items():
            self.status.add(name, reason)
        return means

    def leave_out(self, replies: Replies, reasons: dict[str, str]) -> None:
        """Leave out clients whose replies were valid."""
        for name, reason in reasons.items():
            replies.leave_out(name, reason)
            self.status.add(name, reason)
            log(WARNING, "%s is left out: %s", name, reason)

    def _expected(
        self, sender: Participant, reference: ArrayRecord | None, evaluation: Instruction | None
    ) -> ArrayRecord | None:
        """Return the names, shapes and types of the arrays in a client's valid reply."""
        if self._sums:
            return self._sums.expected(sender.name, reference, evaluation)
        if reference is not None and sender.rank:
            return to_arrays(cut(from_arrays(reference), sender.rank))
        return reference

    def _record_audit(self, reply: Message, client: str, is_late: bool) -> None:
        """Record which line of the client's audit log records its reply.

        A line's digest depends on all earlier lines, so with the coordinator's record, ``chambers
        site audit`` notices a log that was shortened or replaced. Warn if an earlier reply of the
        run had a later line, unless this one is late.
        """
        if found := audit_of(reply):
            line, digest = found
            before = self._audit_lines.get(client, 0)
            self._audit_lines[client] = max(before, line)
            if line <= before and not is_late:
                text = "%s: its audit log was lost or restored: line %d follows line %d"
                log(WARNING, text, client, line, before)
            event = {"event": "audit", "client": client, "line": line, "digest": digest}
            self._journal.record(event)
