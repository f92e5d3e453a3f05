"""A certificate authority stored in a folder, and the coordinator's certificate."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
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
from finetuning.files import write_file, write_secret

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
        end = datetime.now(UTC) + timedelta(days=days)
        if end > self.certificate.not_valid_after_utc:
            raise CommandError(
                f"{folder / AUTHORITY} expires in {days_left(self.certificate)} days, before the "
                "certificate would; create a new authority, as docs/operations.md describes"
            )
        issuer = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        extensions = (
            x509.BasicConstraints(ca=False, path_length=None),
            _usage(digital_signature=True),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.SubjectAlternativeName([_general_name(name) for name in names]),
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer.value),
        )
        return _create(folder / SERVER, names[0], end, extensions, self).certificate


def open_authority(folder: Path, new_days: int = _AUTHORITY_DAYS) -> Authority:
    """Read the authority in the folder or, if there is none, create one valid for ``new_days``.

    Raise ``CommandError`` if a file is missing or invalid, or the key isn't the certificate's.
    """
    file = folder / AUTHORITY
    key_file = file.with_suffix(".key")
    if not file.exists() and not key_file.exists():
        end = datetime.now(UTC) + timedelta(days=new_days)
        limits = x509.BasicConstraints(ca=True, path_length=0)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        return _create(file, "Chambers authority", end, (limits, usage))
    for here, other in ((file, key_file), (key_file, file)):
        if not here.exists():
            raise CommandError(f"{here} is missing: restore it, or move {other} to another folder")
    certificate, key = read_certificate(file), read_tls_key(key_file)
    if key.public_key() != certificate.public_key():
        raise CommandError(f"{key_file} is not the key of {file}")
    return Authority(certificate, key)


def read_certificate(file: Path) -> x509.Certificate:
    """Read a certificate in PEM format; raise ``CommandError`` if the file isn't one."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(file))
    except ValueError as error:
        raise CommandError(f"{file} is not a certificate in PEM format") from error


def read_tls_key(file: Path) -> ec.EllipticCurvePrivateKey:
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


def names_in(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a certificate is valid for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def days_left(certificate: x509.Certificate) -> int:
    """Return the number of whole days until a certificate expires, negative afterwards."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def _create(
    file: Path,
    name: str,
    end: datetime,
    extensions: Iterable[x509.ExtensionType],
    issuer: Authority | None = None,
) -> Authority:
    """Write a certificate, signed by the issuer or else by itself, and its new key.

    The key is written to the file with the suffix ``.key``.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    # The field is limited to 64 characters. Clients ignore it, and use the alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .serial_number(x509.random_serial_number())
        .public_key(key.public_key())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))  # some machines' clocks are slow
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for each in extensions:
        critical = isinstance(each, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(each, critical=critical)
    certificate = builder.sign(issuer.key if issuer else key, hashes.SHA256())
    key_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_secret(file.with_suffix(".key"), key_bytes)
    write_file(file, certificate.public_bytes(Encoding.PEM))
    return Authority(certificate, key)


def _usage(**allowed: bool) -> x509.KeyUsage:
    kinds = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{kind: allowed.get(kind, False) for kind in kinds})


def _general_name(name: str) -> x509.GeneralName:
    address = _address(name)
    return x509.IPAddress(address) if address else x509.DNSName(name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
