"""Requests to a coordinator, with errors that explain the cause and the solution."""

import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection, InvalidURL
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from chambers.errors import CommandError
from chambers.site.authority import days_left, read_certificate
from federation.flower_internals import (
    ActivateNodeRequest,
    ApiErrorCode,
    FleetHttpClient,
    FlowerError,
    NodeAuthHttpInterceptor,
    public_key_to_bytes,
)
from split.address import parse_address

_TIMEOUT_SECONDS = 10.0
# See openssl-verification-options(1) and X509_STORE_CTX_get_error(3).
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64
# Maximum clock differences in seconds at which Flower accepts a node's signature
# (SYSTEM_TIME_TOLERANCE and TIMESTAMP_TOLERANCE).
_MAX_AHEAD, _MAX_BEHIND = 5, 300


@dataclass(frozen=True)
class ServerAnswer:
    """The response to a request."""

    status: int
    ahead: float  # seconds (±0.5) by which this machine's clock is ahead of the server's
    certificate: x509.Certificate


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address into host and port; raise ``CommandError`` if it isn't one."""
    try:
        return parse_address(address)
    except ValueError as error:
        raise CommandError(f"{address} {error}") from error


def get(address: str, path: str, authority: Path) -> ServerAnswer:
    """Send a GET request over TLS; ``authority`` is a file of trusted certificates.

    Raise ``CommandError`` if no server with this name answers over TLS.
    """
    host, port = host_and_port(address)
    read_certificate(authority)
    context = ssl.create_default_context(cafile=authority)
    try:
        connection = HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=context)
    except InvalidURL as error:
        raise CommandError(f"{address} must be an address and a port: {error}") from error
    try:
        before = datetime.now(UTC)
        connection.request("GET", path)
        assert isinstance(connection.sock, ssl.SSLSocket)
        certificate = connection.sock.getpeercert(binary_form=True)
        response = connection.getresponse()
        after = datetime.now(UTC)
        server_time = parsedate_to_datetime(response.headers["Date"])
    except (OSError, HTTPException, TypeError, ValueError) as error:
        raise CommandError(f"{address}: {_explain(error, host, authority)}") from error
    finally:
        connection.close()
    assert certificate is not None
    # The Date header is truncated to whole seconds, so on average it is half a second behind.
    ahead = (before + (after - before) / 2 - server_time).total_seconds() - 0.5
    return ServerAnswer(response.status, ahead, x509.load_der_x509_certificate(certificate))


def get_health(address: str, authority: Path) -> ServerAnswer:
    """Request ``/health`` from a SuperLink or its proxy; raise ``CommandError`` on failure."""
    answer = get(address, "/health", authority)
    if answer.status != 200:
        raise CommandError(
            f"{address} answers {answer.status} to /health: the proxy is running, but can't reach "
            "the SuperLink; start the SuperLink, and see the proxy's error log"
        )
    return answer


def check_filter(address: str, authority: Path) -> str:
    """Check that a proxy blocks the Control API, which has no authentication."""
    status = get(address, "/v1/control/", authority).status
    if status != 403:
        raise CommandError(
            f"{address} answers {status} to /v1/control/ instead of 403: whoever reaches it can "
            "run code at the coordinator and at all institutions; make only the proxy reachable, "
            "and let it pass only /v1/fleet/ and /health"
        )
    return f"{address} refuses requests to the Control API"


def is_registered(superlink: str, authority: Path, key: ec.EllipticCurvePrivateKey) -> bool:
    """Ask a SuperLink whether a node key is registered, without activating the node.

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


def check_certificate(certificate: x509.Certificate, what: str, renewal: str) -> str:
    """Check that a certificate is valid for 30 more days; ``renewal`` describes how to renew it."""
    days, end = days_left(certificate), certificate.not_valid_after_utc.date()
    if days < 0:
        raise CommandError(f"{what} expired on {end}: {renewal}")
    if certificate.not_valid_before_utc > datetime.now(UTC):
        start = certificate.not_valid_before_utc.date()
        raise CommandError(f"{what} is not valid before {start}: set this machine's clock")
    if days < 30:
        raise CommandError(f"{what} expires in {days} days, on {end}: {renewal}")
    return f"{what} is valid for {days} days, until {end}"


def check_certificate_file(file: Path, renewal: str) -> str:
    """Check a certificate in a file; see ``check_certificate``."""
    return check_certificate(read_certificate(file), str(file), renewal)


def check_clock(ahead: float) -> str:
    """Check the difference between this machine's clock and the coordinator's."""
    text = (
        f"clock: about {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
    )
    if ahead > _MAX_AHEAD or -ahead > _MAX_BEHIND:
        raise CommandError(
            f"{text}; beyond {_MAX_AHEAD} s ahead or {_MAX_BEHIND} s behind, the SuperLink "
            "refuses node keys: set the clock, or have NTP set it"
        )
    return text


def _explain(error: Exception, host: str, authority: Path) -> str:
    """Explain why there was no answer, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_problem(error, host, authority)
    causes: dict[type[Exception], str] = {
        ssl.SSLError: "it doesn't speak TLS: enter the address and port of the proxy",
        socket.gaierror: f"the name {host} is unknown here: correct it, or add it to DNS",
        TimeoutError: f"no answer within {_TIMEOUT_SECONDS:g} s: allow connections to this address "
        "in the firewalls here and at the coordinator",
        ConnectionRefusedError: "nothing listens there: start the server, or correct the port",
        HTTPException: "it doesn't answer as a SuperLink or its proxy does",
    }
    return next((text for kind, text in causes.items() if isinstance(error, kind)), str(error))


def _certificate_problem(error: ssl.SSLCertVerificationError, host: str, authority: Path) -> str:
    if error.verify_code == _EXPIRED:
        return (
            "the certificate has expired, if this machine's clock is right: the coordinator must "
            "renew it (docs/operations.md)"
        )
    if error.verify_code == _NOT_YET_VALID:
        return "the certificate is not valid yet: set this machine's clock"
    if error.verify_code in {_OTHER_HOST, _OTHER_ADDRESS}:
        return (
            f"the certificate is not valid for the name {host}: use a name in it, or ask the "
            f"coordinator for a certificate that is valid for {host}"
        )
    return (
        f"the certificate is not signed by the authority in {authority} ({error.verify_message}): "
        "get authority.pem from the coordinator"
    )
