"""Check that an instruction comes from the coordinator and is not a replay."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Message

from federation.authentication import AuthenticationError, SignedInstruction
from federation.instruction_keys import read_public_key
from federation.site_policy import SitePolicy


def authenticate(
    policy: SitePolicy, message: Message, context: Context, instruction: SignedInstruction | None
) -> None:
    """Raise ``AuthenticationError`` unless the coordinator signed a message for this site and time.

    Raise ``PolicyError`` if the coordinator's key can't be read.
    """
    key = read_public_key(policy.instruction_key)
    if instruction is None:
        raise AuthenticationError(
            "the instruction is not signed, but the site's policy requires it (instruction-key)"
        )
    instruction.verify(key, message, context.node_id, context.run_id)


def check_fresh(
    about: Mapping[str, Any], run_id: int, time: float, lines: Iterable[Mapping[str, Any]]
) -> None:
    """Raise ``AuthenticationError`` if this or a newer instruction of the run was received before.

    A resumed run repeats rounds, but with a different Flower run id (``run_id``). ``about``
    contains the ``client``, ``nonce``, ``run`` (lineage) and ``round`` of the instruction; ``time``
    is the Unix time of signing, in seconds; ``lines`` are the existing lines of the audit log.
    """
    for line in lines:
        if line.get("event") != "instruction" or line.get("client") != about["client"]:
            continue
        if line.get("nonce") == about["nonce"]:
            raise AuthenticationError("the instruction was received before")
        if line.get("run") != about.get("run"):
            continue
        if line.get("signed", 0.0) > time:
            raise AuthenticationError(
                "the instruction was signed before one that was already received for the same run"
            )
        if line.get("run-id") == str(run_id) and line.get("round", 0) > about.get("round", 0):
            raise AuthenticationError(
                "the instruction is for an earlier round than one that was already received"
            )
