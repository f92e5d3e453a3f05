"""FedProx (Li et al., 2020): averaging by data size, with a proximal term in local training."""

from strategies.rounds import Rounds


class FedProx(Rounds):
    """The server averages as in FedAvg; clients add μ/2 · ‖W − Ŵ‖² to their loss in every round."""
