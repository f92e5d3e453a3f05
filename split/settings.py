"""Settings of split learning, validated in the same way as the settings of fine-tuning."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from finetuning.settings import Section


class SplitSettings(Section):
    """Split learning (FL-GLM sections 3.1 to 3.3)."""

    schedule: Literal["serial", "client-batch", "hierarchical"] = Field(
        "serial",
        description="How clients share the server's blocks: one after another, all at once with "
        "their micro-batches stacked, or each with its own adapters, which are averaged.",
    )
    order: Literal["shuffled", "names"] = Field(
        "shuffled",
        description="Order of clients in each round of `serial`: shuffled with the run's seed, or "
        "by name. With `names`, the server's blocks always favour the client whose name is last.",
    )
    head_blocks: int = Field(
        1,
        ge=0,
        description="Blocks at the clients after the embedding. If `head-blocks` and "
        "`tail-blocks` are both 0, the split is FedBERT's.",
    )
    tail_blocks: int = Field(1, ge=0, description="Blocks at the clients before the output head.")
    window: PositiveInt = Field(
        4,
        description="Maximum number of micro-batches of a step in flight; affects only speed.",
    )
    wire_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        "bfloat16",
        description="Data type of hidden states and gradients on the network; `int8` has one scale "
        "per token.",
    )
    average_every: int = Field(
        0,
        ge=0,
        description="Steps after which `hierarchical` averages all adapters within a round; 0 "
        "averages them only at the end of a round.",
    )
    activation_budget: PositiveInt = Field(
        16384,
        description="Maximum number of padded tokens, prefixes included, whose activations (or, in "
        "text generation, keys and values) the server stores at once for all clients together. "
        "Lower this number if the server runs out of memory.",
    )
    body_devices: str = Field(
        "",
        description="Devices for the server's blocks, such as `cuda:0,cuda:1`, or `cpu` alone. "
        "Blocks are spread over the devices in order, in proportion to the devices' free memory. "
        "Empty: all GPUs of the server, or the CPU if there is no GPU.",
    )
    body_hosts: str = Field(
        "",
        description="Addresses of `chambers stage` on other hosts of the coordinator, such as "
        "`10.0.0.6:9100,10.0.0.7:9100`, among which the server's blocks are divided evenly.",
    )
    body_key: str = Field(
        "",
        description="File with the private key and certificate of `split.body-hosts`; an "
        "absolute path on the server.",
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="Address and port of the block server; port 0 chooses a free port.",
    )
    advertise: str = Field(
        "",
        description="Address and port at which clients reach the block server; if empty, `listen`.",
    )
    key_exchange: Literal["ml-kem-768-x25519", "rsa-3072"] = Field(
        "ml-kem-768-x25519",
        description="Encryption of the lanes' secrets: HPKE with a post-quantum hybrid, or the "
        "paper's RSA with OAEP.",
    )
    rotate_keys_every: PositiveInt = Field(
        1, description="Rounds after which the server generates a new key."
    )
    share_cap: float = Field(
        3.0,
        ge=1,
        description="With `client-batch`, the cap on four values of a client, as a multiple of the "
        "other clients' median (of an even number, the larger middle value): the size of its "
        "gradients per predicted token and per step, its number of predicted tokens per step, and "
        "the norm that it reports. Larger values are scaled down, and the log names the client.",
    )
    join_timeout: PositiveFloat = Field(
        120.0,
        description="Seconds for which clients that train together wait for each other to join.",
    )
    gather_timeout: PositiveFloat = Field(
        60.0,
        description="Seconds after which `client-batch` continues without clients that others are "
        "waiting for. The lane of a silent client also ends after this time if other "
        "clients wait for the part of `activation-budget` that the client occupies. Once waiting "
        "has taken half of `round-timeout`, the client that caused the longest wait is dropped.",
    )
    resume_timeout: PositiveFloat = Field(
        30.0,
        description="Seconds within which a lane must be resumed after the network cuts it. With "
        "`client-batch`, other clients wait no longer than `gather-timeout` for the lane's client.",
    )
    frame_timeout: PositiveFloat = Field(
        300.0,
        description="Seconds that client and server wait for each other's next frame. At the end "
        "of a step, a client waits for the server until the round ends. While other clients wait "
        "for the part of `activation-budget` that a client occupies, that client may be silent for "
        "this long in total during a step, or during the generation of a batch.",
    )

    @property
    def body_device_names(self) -> list[str]:
        """The devices in ``body_devices``, in order."""
        return [name.strip() for name in self.body_devices.split(",") if name.strip()]

    def problem_with(self, blocks: int, model: str | Path) -> str | None:
        """Return why ``model``, with this number of blocks, can't be divided; None if it can."""
        head, tail = self.head_blocks, self.tail_blocks
        if head + tail < blocks:
            return None
        return (
            f"split.head-blocks = {head} and split.tail-blocks = {tail} leave the server none of "
            f"the {blocks} blocks of {model}; together they can be at most {blocks - 1}"
        )

    @field_validator("body_devices")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")] if value.strip() else []
        are_gpus = all(re.fullmatch(r"cuda:\d+", name) for name in names)
        if len(set(names)) < len(names) or not (are_gpus or names == ["cpu"]):
            raise ValueError("must be different GPUs, like cuda:0,cuda:1; or cpu; or empty")
        return value

    @field_validator("listen", "advertise")
    @classmethod
    def _is_address(cls, value: str, info: ValidationInfo) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 2**16):
            raise ValueError("must be an address and a port, like 127.0.0.1:8900 or [::1]:8900")
        if info.field_name == "listen" and not value:
            raise ValueError("must be an address and a port; 127.0.0.1:0 chooses a free port")
        return value
