"""Settings of split learning, validated in the same way as the settings of fine-tuning."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from finetuning.settings import Section
from split.address import parse_address


class SplitSettings(Section):
    """Split learning (FL-GLM sections 3.1 to 3.3)."""

    schedule: Literal["serial", "client-batch", "hierarchical"] = Field(
        "serial",
        description="How clients share the server's blocks: one after another, all at once with "
        "stacked micro-batches, or each with its own adapters, which are averaged.",
    )
    order: Literal["shuffled", "names"] = Field(
        "shuffled",
        description="Order of clients in each round of `serial`. With `names`, the server's "
        "blocks favour the last client.",
    )
    head_blocks: int = Field(
        1,
        ge=0,
        description="Blocks at the clients after the embedding. With 0 here and in "
        "`tail-blocks`, the split is FedBERT's.",
    )
    tail_blocks: int = Field(1, ge=0, description="Blocks at the clients before the output head.")
    window: PositiveInt = Field(
        4,
        description="Maximum number of micro-batches in flight; affects only speed.",
    )
    wire_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        "bfloat16",
        description="Data type of hidden states and gradients on the network; `int8` has one scale "
        "per token.",
    )
    average_every: int = Field(
        0,
        ge=0,
        description="Steps between `hierarchical`'s averages of all adapters within a round; 0: "
        "only at its end.",
    )
    activation_budget: PositiveInt = Field(
        16384,
        description="Maximum number of padded tokens, prefixes included, whose activations (in "
        "generation, keys and values) the server stores for all clients. Lower it if the server "
        "runs out of memory.",
    )
    body_devices: str = Field(
        "",
        description="Devices for the server's blocks, such as `cuda:0,cuda:1` or `cpu`, filled "
        "in order, in proportion to their free memory. Empty: all GPUs, else the CPU.",
    )
    body_hosts: str = Field(
        "",
        description="Addresses of `chambers stage` on [other "
        "hosts](operations.md#compute-the-middle-blocks-on-several-hosts), such as "
        "`10.0.0.6:9100,10.0.0.7:9100`, among which the server's blocks are divided evenly.",
    )
    body_key: str = Field(
        "",
        description="Absolute path, on the server, of the private key and certificate of "
        "`split.body-hosts`.",
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="Address and port of the block server; 0 is any free port.",
    )
    advertise: str = Field(
        "",
        description="Address and port for clients, if it isn't `listen`.",
    )
    key_exchange: Literal["ml-kem-768-x25519", "rsa-3072"] = Field(
        "ml-kem-768-x25519",
        description="Encryption of the lanes' secrets: HPKE with a post-quantum hybrid, or the "
        "paper's RSA.",
    )
    rotate_keys_every: PositiveInt = Field(
        1, description="Rounds after which the server generates a new key."
    )
    share_cap: float = Field(
        3.0,
        ge=1,
        description="With `client-batch`, the cap on a client's gradients, predicted tokens and "
        "reported norm, as a multiple of the other clients' median. Larger values are scaled "
        "down, and logged.",
    )
    join_timeout: PositiveFloat = Field(
        120.0,
        description="Seconds that clients that train together wait for each other at the "
        "beginning.",
    )
    gather_timeout: PositiveFloat = Field(
        60.0,
        description="Seconds after which `client-batch` continues without clients that others "
        "wait for, and a silent client's lane ends if others need its memory. Once others have "
        "waited for half of `round-timeout` (also with `average-every`), the client that they "
        "waited for longest is left out.",
    )
    resume_timeout: PositiveFloat = Field(
        30.0,
        description="Seconds within which a lane must be resumed after the network cuts it. With "
        "`client-batch`, others wait for it no longer than `gather-timeout`.",
    )
    frame_timeout: PositiveFloat = Field(
        300.0,
        description="Seconds that client and server wait for each other's next frame. While "
        "others wait for memory (`activation-budget`) that a client occupies, it may be silent "
        "for this long in total in a step or a batch of answers.",
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
        if value:
            _, port = parse_address(value)
            if not port and info.field_name == "advertise":
                raise ValueError("must have a port other than 0")
        elif info.field_name == "listen":
            raise ValueError("must be an address and a port; 127.0.0.1:0 chooses a free port")
        return value
