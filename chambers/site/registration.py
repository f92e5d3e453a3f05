"""Check whether a node key is registered at a SuperLink, without activating the node."""

from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from chambers.errors import CommandError
from federation.flower_internals import (
    ActivateNodeRequest,
    ApiErrorCode,
    FleetHttpClient,
    FlowerError,
    NodeAuthHttpInterceptor,
    public_key_to_bytes,
)


def is_registered(superlink: str, authority: Path, key: ec.EllipticCurvePrivateKey) -> bool:
    """Ask a SuperLink whether a node key is registered.

    The function requests activation with an invalid heartbeat interval. The SuperLink always
    refuses this request; its error code depends on whether the key is registered. Raise
    ``CommandError`` if there is no response, or it contains neither of the two error codes.
    """
    public = key.public_key()
    client = FleetHttpClient.from_server_address(
        superlink, False, authority.read_bytes(), [NodeAuthHttpInterceptor(key, public)]
    )
    try:
        client.ActivateNode(
            ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0)
        )
    except httpx.HTTPStatusError as error:
        reason = FlowerError.from_json(error.response.text)
        if reason and reason.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return True
        if reason and reason.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return False
        raise CommandError(
            f"{superlink} answers {error.response.status_code} to /v1/fleet/, the SuperNodes' "
            "path: configure the proxy to forward requests for this path to the SuperLink"
        ) from error
    except httpx.HTTPError as error:
        problem = f"{superlink} doesn't say whether the node key is registered: {error}"
        raise CommandError(problem) from error
    finally:
        client.close()
    raise CommandError(f"{superlink} has unexpectedly activated the node")
