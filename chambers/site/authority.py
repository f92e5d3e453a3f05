"""A certificate authority stored in a folder, and the coordinator's certificate."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from chambers.errors import CommandError, read_bytes
from finetuning.files import replacing, write_secret

# File names of certificates; the private key of NAME.pem is in NAME.key.
AUTHORITY, SERVER = "authority.pem", "server.pem"
# The coordinator's programs and commands connect to 127.0.0.1 or, in containers, to these names;
# without them, no run could start.
INSIDE = ("localhost", "127.0.0.1", "superlink", "proxy")
# Ten years and a day, so that a certificate can be valid for ten years.
_AUTHORITY_DAYS = 3651
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*")


@dataclass(frozen=True)
class Authority:
    """A certificate authority with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue(self, folder: Path, names: Sequence[str], days: int) -> x509.Certificate:
        """Write a server's certificate with a new key to ``server.pem`` and ``server.key``.

        The certificate is valid for the host names and addresses in ``names``. Raise
        ``CommandError`` if the authority would expire before the certificate.
        """
        now = datetime.now(UTC)
        end = now + timedelta(days=days)
        if end > self.certificate.not_valid_after_utc:
            raise CommandError(
                f"{folder / AUTHORITY} expires in {days_left(self.certificate)} days, before the "
                "certificate would; create a new authority, as docs/operations.md describes"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate = (
            _builder(key.public_key(), now, end)
            .subject_name(_common_name(names[0]))
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer.value),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        _write(folder / SERVER, certificate, key)
        return certificate


def open_authority(folder: Path, new_days: int = _AUTHORITY_DAYS) -> Authority:
    """Read the authority in the folder or, if there is none, create one valid for ``new_days``.

    Raise ``CommandError`` if a file is missing or invalid, or the key isn't the certificate's.
    """
    file = folder / AUTHORITY
    key_file = file.with_suffix(".key")
    if not file.exists() and not key_file.exists():
        return _create_authority(folder, new_days)
    for here, other in ((file, key_file), (key_file, file)):
        if not here.exists():
            raise CommandError(f"{here} is missing: restore it, or move {other} to another folder")
    certificate, key = read_certificate(file), read_key(key_file)
    if key.public_key() != certificate.public_key():
        raise CommandError(f"{key_file} is not the key of {file}")
    return Authority(certificate, key)


def read_certificate(file: Path) -> x509.Certificate:
    """Read a certificate in PEM format; raise ``CommandError`` if the file isn't one."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(file))
    except ValueError as error:
        raise CommandError(f"{file} is not a certificate in PEM format") from error


def read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read an elliptic-curve key in PEM format; raise ``CommandError`` if the file isn't one."""
    try:
        key = load_pem_private_key(read_bytes(file), password=None)
    except (TypeError, ValueError) as error:  # TypeError: the key has a passphrase
        problem = f"{file} is not a private key in PEM format, or has a passphrase"
        raise CommandError(problem) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CommandError(f"{file} is not an elliptic-curve key")
    return key


def check_names(names: Sequence[str]) -> list[str]:
    """Return the names followed by those used at the coordinator, without duplicates.

    Raise ``CommandError`` if one is neither a host name nor an address.
    """
    for name in names:
        if not (_HOST.fullmatch(name) or _address(name)):
            raise CommandError(
                f"{name!r} must be a host name such as coordinator.example.org, or an IP "
                "address, without a port"
            )
    return list(dict.fromkeys([*names, *INSIDE]))


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a certificate is valid for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


def days_left(certificate: x509.Certificate) -> int:
    """Return the number of whole days until a certificate expires, negative afterwards."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def _create_authority(folder: Path, days: int) -> Authority:
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("Chambers authority")
    certificate = (
        _builder(key.public_key(), now, now + timedelta(days=days))
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY, certificate, key)
    return Authority(certificate, key)


def _builder(
    key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .public_key(key)
        .not_valid_before(now - timedelta(days=1))  # some machines' clocks are slow
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    kinds = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{kind: allowed.get(kind, False) for kind in kinds})


def _common_name(text: str) -> x509.Name:
    # The field is limited to 64 characters. Clients ignore it, and use the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(name: str) -> x509.GeneralName:
    address = _address(name)
    return x509.IPAddress(address) if address else x509.DNSName(name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _write(file: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a certificate, and its key to the file with the suffix ``.key``."""
    key_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_secret(file.with_suffix(".key"), key_bytes)
    with replacing(file) as aside:
        aside.write_bytes(certificate.public_bytes(Encoding.PEM))
