"""FedJudge: federated LoRA with weighted averaging, with or without a continual-learning penalty.

FedProx has the same server.
"""

from collections.abc import Iterable
from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from federation.messages import CONFIG, IMPORTANCE, Instruction, to_arrays
from finetuning.adapters.adapter import State
from finetuning.aggregation.robust_aggregation import ImportanceCap
from finetuning.aggregation.weighted_mean import WeightedMean
from strategies.journal import record_scaled
from strategies.masked_sums import GroupMeans
from strategies.participants import RefusedError, TooFewClientsError
from strategies.replies import Replies
from strategies.rounds import Rounds


class FedJudgeBase(Rounds):
    """FedJudge-Base: clients minimise Eq. 1; the server averages adapters by data size (Eq. 2)."""


class FedProx(FedJudgeBase):
    """FedProx (Li et al., 2020): as FedJudge-Base, but clients add a proximal term to the loss."""


class FedJudgeCL(FedJudgeBase):
    """FedJudge-CL: from round 2 on, clients penalise changes to important weights (Eq. 3 and 4)."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Create a train message, with any average importance J, for every client of the round.

        Raise ``RefusedError`` if all clients that evaluate withhold J, which the next round needs.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if self._evaluation(server_round).importance and self._participants.all_withhold:
            raise RefusedError(
                "FedJudge-CL needs the importance of the weights, but the policies of all clients "
                'that evaluate withhold it; use strategy = "fedjudge-base"'
            )
        if server_round == 1:
            return messages
        own = self.config.continual.importance == "client"
        # Unless clients use their own J, ``_use_importance`` has set the average.
        averaged = None if own else to_arrays(self.progress.importance or {})
        for message in messages:
            message.content.config_records[CONFIG]["importance"] = own
            if averaged is not None:
                message.content[IMPORTANCE] = averaged
        return messages

    def _evaluation(self, server_round: int) -> Instruction:
        averaged = self.config.continual.importance == "server"
        wanted = averaged and 0 < server_round < self.config.rounds
        return replace(super()._evaluation(server_round), importance=wanted)

    def _use_importance(self, replies: Replies | GroupMeans) -> None:
        """Average J over the clients or groups, weighted by data size, within ``ImportanceCap``."""
        server_round = self.progress.finished_rounds
        if not self._evaluation(server_round).importance:
            return
        cap = ImportanceCap()
        # Too few groups of masked sums have no typical values.
        is_capped = len(replies.sizes) > 2 or not self.config.sums.enabled
        for _, values in replies.tensors() if is_capped else ():
            cap.add(values)
        counted = self._averaging.counted(replies.sizes)
        importance: State = {}
        for key, values in replies.tensors():
            mean = WeightedMean()
            for name, value in cap.cap(values).items():
                mean.add({key: value}, counted[name])
            importance |= mean.result()
        if not importance:
            raise TooFewClientsError(
                f"no client computed the importance of the weights after round {server_round}"
            )
        record_scaled(self._journal, server_round, "importance", cap.factors)
        self.progress = replace(self.progress, importance=importance)
