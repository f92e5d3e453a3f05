"""Settings of the server's update (``strategies/server_update.py``)."""

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from finetuning.settings import Section


class ServerSettings(Section):
    """What the server does with the mean of the clients' adapters (Reddi et al., 2021)."""

    update: Literal["mean", "momentum", "adam", "yogi"] = Field(
        "mean",
        description="`mean`: the mean is the global adapter (FedJudge Eq. 2). Otherwise, its "
        "difference from the round's initial adapter is the gradient of FedAvgM (`momentum`), "
        "FedAdam or FedYogi. Not for `fl-glm`.",
    )
    learning_rate: PositiveFloat = Field(
        1.0,
        description="Learning rate of `server.update`. `adam` and `yogi` move each weight by "
        "about this much in a round; 0.01 suits them.",
    )
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the momentum from round to round.")
    beta_2: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="Decay of the second moment; only for `adam` and `yogi`.",
    )

    @model_validator(mode="after")
    def _has_no_unused_setting(self) -> "ServerSettings":
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name, value in usual.items() if getattr(self, name) != value}
        if self.update == "mean" and changed:
            raise ValueError(
                "server.learning-rate, server.beta-1 and server.beta-2 are not for server.update = "
                '"mean"'
            )
        if self.update in {"adam", "yogi"} and "learning_rate" not in changed:
            raise ValueError(
                f'server.update = "{self.update}" needs a smaller server.learning-rate, such as '
                "0.01"
            )
        if self.update == "momentum" and "beta_2" in changed:
            raise ValueError('server.beta-2 is not for server.update = "momentum"')
        return self
