"""Checks of a coordinator's machine."""

import sqlite3
import tomllib
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs
from cryptography.exceptions import InvalidSignature

from chambers.disk_space import ACCESS_LOG, find_existing, top_sender
from chambers.errors import CommandError
from chambers.site import host
from chambers.site.authority import AUTHORITY, SERVER, names_in, read_certificate, read_tls_key
from chambers.site.connection import check_certificate_file, check_filter, get_health
from chambers.site.keys import check_instructions, check_secret
from chambers.site.report import AdviceError, Report, check_disk, check_gpu, check_model


def report_on_coordinator(folder: Path, model: str, superlink: str = "", proxy: str = "") -> Report:
    """Check the certificates, the SuperLink and its proxy, database, model, disks, GPU and clock.

    ``folder`` is the coordinator's. The institutions' checks verify the certificate's public name.
    The default of ``superlink`` is the address to which the folder's ``flwr`` connects, and the
    default of ``proxy`` is on the host from which the SuperLink fetches the release.
    """
    report = Report()
    authority, server = folder / AUTHORITY, folder / SERVER
    database = folder / "database" / "superlink.db"
    report.line(_pair, server, server.with_suffix(".key"))
    report.line(_chain, server, authority)
    renewal = f"{_renewal(server)}, then restart the proxy and the SuperLink"
    report.line(check_certificate_file, server, renewal)
    report.line(
        check_certificate_file, authority, "create a new authority, as docs/operations.md describes"
    )
    report.line(check_instructions, folder)
    proxy = proxy or f"{urlsplit(host.HUB).hostname}:8443"
    report.line(_answers, "SuperLink", superlink, folder)
    if report.line(_answers, "proxy", proxy, folder):
        report.line(check_filter, proxy, authority)
    report.line(_writable, database)
    if model:
        report.line(check_model, model)
    results = platformdirs.user_data_path("chambers") / "runs"
    report.line(
        check_disk,
        database.parent,
        "add space, or shrink the database as docs/operations.md describes",
    )
    report.line(_apart, database.parent, [folder, results])
    report.line(check_disk, results)
    report.line(_sender, folder / ACCESS_LOG)
    # With fl-glm, the coordinator runs the body of the model.
    report.line(check_gpu)
    report.line(_clock)
    return report


def _connection(folder: Path) -> str:
    file = folder / "state" / ".flwr" / "config.toml"
    if not file.exists():
        return "127.0.0.1:8000"
    try:
        return str(tomllib.loads(file.read_text())["superlink"]["deployment"]["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{file} has no address of the SuperLink ({error}): delete it, and run chambers site "
            "coordinator again"
        ) from error


def _pair(file: Path, key_file: Path) -> str:
    if read_tls_key(key_file).public_key() != read_certificate(file).public_key():
        raise CommandError(f"{key_file} is not the key of {file}: {_renewal(file)}")
    check_secret(key_file)
    return f"{key_file} is the key of {file}"


def _chain(file: Path, authority: Path) -> str:
    try:
        read_certificate(file).verify_directly_issued_by(read_certificate(authority))
    except (InvalidSignature, TypeError, ValueError) as error:
        raise CommandError(f"{file} is not signed by {authority}: {_renewal(file)}") from error
    names = ", ".join(names_in(read_certificate(file)))
    return f"{file} is signed by {authority}, for {names}"


def _renewal(server: Path) -> str:
    return f"delete {server}, and run chambers site coordinator again"


def _answers(what: str, address: str, folder: Path) -> str:
    """Check that the SuperLink or its proxy uses the certificate in the folder."""
    address = address or _connection(folder)
    shown = get_health(address, folder / AUTHORITY).certificate
    if shown != read_certificate(folder / SERVER):
        raise CommandError(
            f"the {what} at {address} does not use the certificate {folder / SERVER}: restart it"
        )
    return f"the {what} at {address} answers over TLS"


def _writable(database: Path) -> str:
    """Check, by briefly locking the database, that this user can write to it."""
    if not database.is_file():
        raise CommandError(f"{database} doesn't exist: start the SuperLink")
    uri = f"{database.absolute().as_uri()}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=10.0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error as error:
        raise CommandError(
            f"{database} can't be written: {error}; run this command as the SuperLink's user, "
            "and check who owns the file and its folder"
        ) from error
    return f"{database} can be written"


def _apart(folder: Path, others: Sequence[Path]) -> str:
    """Check that the database can't fill the file systems of the other folders."""
    device = find_existing(folder).stat().st_dev
    shared = [str(path) for path in others if find_existing(path).stat().st_dev == device]
    if shared:
        raise AdviceError(
            f"{folder} is on the same file system as {' and '.join(shared)}: messages from "
            "institutions can fill it; mount another file system, as docs/deployment.md describes"
        )
    return f"{folder} is on a file system of its own"


def _sender(log: Path) -> str:
    if not log.exists():
        raise AdviceError(
            f"{log} doesn't exist, so the address that sends the most data is unknown"
        )
    return top_sender(log)


def _clock() -> str:
    return f"clock: {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC; institutions' clocks must match"
