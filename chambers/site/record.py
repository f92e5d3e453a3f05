"""``chambers site record``: a signed page about what an institution's data was used for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chambers.errors import CommandError
from chambers.site import host
from chambers.site.audit import open_policy
from chambers.sources import check_output, option
from finetuning.files import write_file, write_json

if TYPE_CHECKING:
    from federation.site_policy import SitePolicy

_PREFIX = b"Chambers record 1\n"
# What only people can judge.
BLANKS = (
    "Legal basis of the processing",
    "Why it is necessary and proportionate",
    "Categories of data and of persons",
    "Risks to these persons, and what was done about each",
    "Opinion of the data protection officer",
    "When data, adapters and models are deleted",
)
_VERIFY = "Verify the signature of this record.json instead, with the public key --key."


@dataclass(frozen=True)
class Record:
    """Write record.json and record.html: what was processed, and what left, when and to whom.

    The page is an annex to a data protection impact assessment. It is made from the policy, the
    audit log, the privacy account and the leak tests, and has blanks for what only people can
    judge. The JSON file is signed with the node key. Neither contains text of rows.
    """

    folder: Annotated[Path, host.FOLDER_OPTION] = Path()
    output: Annotated[
        Path | None, option("Folder for the files; default: the host's folder state.", "FOLDER")
    ] = None
    verify: Annotated[Path | None, typer.Option(metavar="FILE", help=_VERIFY)] = None
    key: Annotated[Path | None, option("Public key of the institution.", "node.pub")] = None

    def __call__(self) -> int:
        """Write both files, or verify a signature."""
        if self.verify:
            _verify(self.verify, self.key)
            return 0
        from chambers.site.keys import read_node_key

        folder = self.folder.absolute()
        name, policy = open_policy(folder)
        output = (self.output or folder / "state").absolute()
        check_output(output / "record.json")
        facts = collect(name, policy, folder)
        signed = _sign(facts, read_node_key(folder / "node"))
        write_json(output / "record.json", signed)
        write_file(output / "record.html", _page(facts, signed))
        print(f"{output / 'record.html'}\n{output / 'record.json'}")
        return 0


def collect(name: str, policy: "SitePolicy", folder: Path) -> dict[str, Any]:
    """Return the facts of a record; None means unknown."""
    from client_app.audit import AuditLog
    from client_app.audit_report import audit
    from client_app.code_digest import code_digest
    from client_app.privacy_account import PrivacyAccount
    from client_app.state import ClientState
    from federation.sums.members import read_reviewers

    trusted = folder / host.TRUSTED
    log, privacy = AuditLog(policy.audit_file), policy.privacy
    found, runs = audit(log), {}
    states = {run: ClientState("", run, name).directory for run in found.runs}
    for run, about in sorted(found.runs.items(), key=lambda item: item[1].first):
        runs[run] = about.to_dict() | {"leak test": _leaks(states[run] / "leaks.json")}
    spent = PrivacyAccount(policy).spent() if privacy.epsilon is not None else None
    return {
        "institution": name,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version("chambers"),
        "digest of the code": code_digest(),
        "coordinator": host.read_environment(folder / host.INSTITUTION).get("COORDINATOR", ""),
        "purpose": policy.purpose,
        "agreement": policy.agreement,
        "valid until": str(policy.not_after or ""),
        "reviewers of the code": sorted(read_reviewers(trusted)) if trusted.exists() else [],
        "policy": _limits(policy),
        "privacy": {"epsilon": privacy.epsilon, "delta": privacy.delta, "spent": spent},
        "audit log": {
            "lines": found.lines,
            "digest of the last line": found.digest,
            "problems": found.problems,
            "messages refused as not authentic": found.refused,
        },
        "runs": runs,
        "kept on this disk": {
            "adapters and states of runs": _size(*states.values()),
            "audit log": _size(*log.files()),
            "row ledger": _size(policy.audit_file.parent / "rows"),
            "logs of programs": _size(folder / "state" / "logs"),
        },
    }


def _size(*paths: Path) -> int:
    """Return the size of files and folders, in bytes."""
    files = (file for path in paths for file in (path, *path.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


def _limits(policy: "SitePolicy") -> dict[str, Any]:
    """Return the keys that are set in a policy, with the names of files instead of their paths."""
    limits = json.loads(policy.model_dump_json(by_alias=True, exclude_unset=True))

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(each) for key, each in value.items()}
        if isinstance(value, list):
            return [named(each) for each in value]
        return Path(value).name if isinstance(value, str) and value.startswith("/") else value

    return dict(named(limits))


def _leaks(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    values = json.loads(file.read_bytes())
    rounded = {key: round(values[key], 3) for key in ("auc", "auc_low", "auc_high")}
    return rounded | {key: values[key] for key in ("extracted", "spans", "exceeded")}


def _content(facts: Mapping[str, Any]) -> bytes:
    return _PREFIX + json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()


def _sign(facts: Mapping[str, Any], key: Any) -> dict[str, Any]:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    from chambers.site.keys import hash_node_key

    return {
        "record": facts,
        "signature": key.sign(_content(facts), ECDSA(SHA384())).hex(),
        "key": hash_node_key(key.public_key()),
    }


def _verify(file: Path, key: Path | None) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    from chambers.site.keys import read_node_public_key

    if key is None:
        raise CommandError("--verify needs --key: the node.pub of the institution")
    try:
        signed = json.loads(file.read_bytes())
        public = read_node_public_key(key)
        content = _content(signed["record"])
        public.verify(bytes.fromhex(signed["signature"]), content, ECDSA(SHA384()))
    except (OSError, ValueError, KeyError, TypeError, InvalidSignature) as error:
        raise CommandError(f"{file} is not a record that the holder of {key} signed") from error
    print(f"{file} was signed by {signed['record']['institution']} with this key")


def _page(facts: Mapping[str, Any], signed: Mapping[str, Any]) -> str:
    from jinja2 import Environment

    template = Path(__file__).with_name("record.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(template).render(facts=facts, signed=signed, blanks=BLANKS)
