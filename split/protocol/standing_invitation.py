"""Invitations to use a served model for a limited time."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, field_validator

from split.address import parse_address
from split.protocol.frames import WireType
from split.protocol.keys import KeyExchange
from split.protocol.tickets import (
    IDENTIFIER_BYTES,
    NAME_BYTES,
    SECRET_BYTES,
    Identity,
    Invitation,
    Ticket,
)
from split.settings import SplitSettings

_Name = Annotated[str, Field(min_length=1, max_length=NAME_BYTES)]
_Count = Annotated[int, Field(ge=0)]


class StandingInvitation(BaseModel):
    """Everything that a client needs to use a served model, including a secret.

    The invitation becomes invalid when it expires or the server stops.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # the input contains a secret
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    format: Literal["chambers invitation 1"] = "chambers invitation 1"
    address: str  # address of the block server, as host:port
    suite: KeyExchange
    server_key: bytes
    run: _Name  # name of the server in handshakes
    client: _Name
    ticket: bytes = Field(min_length=IDENTIFIER_BYTES, max_length=IDENTIFIER_BYTES)
    secret: bytes = Field(min_length=SECRET_BYTES, max_length=SECRET_BYTES, repr=False)
    expires: AwareDatetime
    model: str  # name of the base model at the server
    digests: dict[str, str]  # of the base model's tensors that the client needs and the server has
    blocks: PositiveInt  # number of blocks of the whole model
    head_blocks: _Count
    tail_blocks: _Count
    wire_dtype: WireType
    max_tokens: PositiveInt  # maximum padded tokens of a batch of prompts and answers
    max_prompt_length: PositiveInt  # maximum length of a prompt in tokens
    models: dict[str, str]  # digest of the body adapters, by name of the model; see ``body_digest``

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not parse_address(value)[1]:
            raise ValueError("must have a port other than 0")
        return value

    @property
    def lane(self) -> Invitation:
        """The invitation for opening a lane."""
        return Invitation(
            address=self.address,
            suite=self.suite,
            server_key=self.server_key,
            identity=Identity(self.run, round=0, node=self.client),
            ticket=Ticket(self.ticket, self.secret),
        )

    @property
    def split(self) -> SplitSettings:
        """The settings that server and client share."""
        return SplitSettings(
            head_blocks=self.head_blocks,
            tail_blocks=self.tail_blocks,
            window=1,  # as in ``ModelServer``
            wire_dtype=self.wire_dtype,
            key_exchange=self.suite,
        )
