"""The row ledger: which rows were used in which run, for example if a person asks.

The ledger lies beside the audit log, in the folder ``rows``: for each set of rows that was used, a
file with a keyed digest of every row. The audit log names the set of each accepted message. The key
never leaves the site; without it, nobody can test whether a row is in the ledger.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from client_app.audit import AuditError, AuditLog
from federation.site_policy import SitePolicy
from finetuning.files import replacing, write_secret

_KEY = "key"


def digest_of_row(fields: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 digest of a row as it is in its file; the order of keys doesn't matter."""
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def record_rows(policy: SitePolicy, digests: Iterable[bytes]) -> str:
    """Write the keyed digests of a set of rows, unless they are written; return the set's digest.

    Raise ``AuditError`` if the file can't be written.
    """
    folder = _folder(policy)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            lines = sorted(_keyed(_key(folder), digests))
            content = "".join(f"{line}\n" for line in lines).encode()
            name = hashlib.sha256(content).hexdigest()
            if not (folder / name).exists():
                with replacing(folder / name) as aside:
                    aside.write_bytes(content)
                    aside.chmod(0o600)
    except OSError as error:
        raise AuditError(
            "nothing leaves this site, because its row ledger can't be written: "
            f"{error.strerror or error} ({error.filename or folder})"
        ) from error
    return name


# By run, and by kind of message: the rounds; round 0 is before training.
Uses = dict[str, dict[str, set[int]]]


def find_uses(policy: SitePolicy, digests: Iterable[bytes]) -> list[Uses]:
    """Return the uses of each row; raise ``AuditError`` if files of the ledger are missing."""
    folder = _folder(policy)
    lines = [line for line in AuditLog(policy.audit_file).lines() if "row-set" in line]
    if not lines:
        return [{} for _ in digests]
    names = {str(line["row-set"]) for line in lines}
    if missing := [name for name in (_KEY, *names) if not (folder / name).is_file()]:
        raise AuditError(
            f"the audit log names {len(names)} sets of rows, but {len(missing)} files of the row "
            f"ledger are missing in {folder}, so uses can't be found: restore the folder"
        )
    with _locked(folder):
        wanted = _keyed(_key(folder), digests)
    sets = {name: set(wanted).intersection((folder / name).read_text().split()) for name in names}
    uses: dict[str, Uses] = {each: {} for each in wanted}
    for line in lines:
        for each in sets[str(line["row-set"])]:
            own = uses[each].setdefault(str(line["run"]), {})
            own.setdefault(str(line["kind"]), set()).add(line["round"])
    return [uses[each] for each in wanted]


def _folder(policy: SitePolicy) -> Path:
    return policy.audit_file.parent / "rows"


def _locked(folder: Path) -> FileLock:
    return FileLock(folder / "key.lock", mode=0o600)


def _key(folder: Path) -> bytes:
    file = folder / _KEY
    if not file.exists():
        if any(folder.glob("[0-9a-f]" * 64)):
            raise AuditError(f"the row ledger's key {file} is missing: restore it")
        write_secret(file, secrets.token_bytes(32))
    return file.read_bytes()


def _keyed(key: bytes, digests: Iterable[bytes]) -> list[str]:
    return [hmac.digest(key, digest, "sha256").hex() for digest in digests]
