"""What differs between clients in messages and replies: their group of masked sums, their rank."""

from collections.abc import Iterable, Iterator

from flwr.app import ArrayRecord, Message

from federation.messages import ARRAYS, Instruction, from_arrays, to_arrays
from federation.run_config import RunConfig
from federation.sums.announcement import GROUP, group_record
from finetuning.adapters.adapter import State
from finetuning.aggregation.mixed_ranks import cut
from strategies.masked_sums import GroupMeans, MaskedSums
from strategies.participants import Participant, Participants
from strategies.replies import Replies


class ClientArrays:
    """Adapts messages to their recipients, and says which arrays a client must send."""

    def __init__(self, config: RunConfig, participants: Participants) -> None:
        self._config = config
        self._participants = participants
        self._sums: MaskedSums | None = None  # of the clients that were asked last

    def adapt(self, messages: Iterable[Message], arrays: ArrayRecord) -> Iterator[Message]:
        """Add the announcements of its group to each message, and ``arrays`` at the client's rank.

        The groups are those of the recipients when this is called.
        """
        groups = self._participants.groups
        if self._config.sums.enabled:
            self._sums = MaskedSums(self._config, groups)
        by_rank: dict[int, ArrayRecord] = {}  # clients of equal rank share one record

        def adapted() -> Iterator[Message]:
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

    def expected(
        self, sender: Participant, reference: ArrayRecord | None, evaluation: Instruction | None
    ) -> ArrayRecord | None:
        """Return the names, shapes and types of the arrays in a client's valid reply.

        ``reference`` contains them if all clients send the same, unmasked; None for no arrays.
        ``evaluation`` is the instruction of evaluate messages; None for train messages.
        """
        if self._sums:
            return self._sums.expected(sender.name, reference, evaluation)
        if reference is not None and sender.rank:
            return to_arrays(cut(from_arrays(reference), sender.rank))
        return reference

    def open_sums(self, replies: Replies, reference: State | None) -> GroupMeans | None:
        """Return the means of groups, as in `MaskedSums.open`; None without masked sums."""
        return self._sums.open(replies, reference) if self._sums else None
