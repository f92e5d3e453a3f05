"""Checks of an institution's machine."""

import os
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import platformdirs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from chambers.disk_space import find_existing
from chambers.errors import CommandError
from chambers.site import host
from chambers.site.authority import AUTHORITY
from chambers.site.connection import (
    check_certificate,
    check_certificate_file,
    check_clock,
    check_filter,
    get_health,
    is_registered,
)
from chambers.site.keys import check_secret, read_node_key
from chambers.site.programs import PORT
from chambers.site.report import AdviceError, Report, check_disk, check_gpu, check_model
from client_app.masked_sums import membership
from client_app.privacy_account import PrivacyAccount
from client_app.worker_socket import WorkerError, connected_worker
from federation.authentication import read_public_key
from federation.site_file import (
    VARIABLE,
    SiteFile,
    read_own_policy,
    read_site_file,
    refuse_foreign,
)
from federation.site_policy import read_policy
from federation.sums.members import read_reviewers
from finetuning.data.files import find_parts, list_names
from finetuning.data.formats import DataError
from finetuning.settings import DataSettings
from finetuning.tasks.reading import held_out_part, read_task_rows


def report_on_institution(
    folder: Path, model: str = "", task: str = "", registered: bool = True
) -> Report:
    """Check the connection to the coordinator, keys, policy, data, model and machine.

    ``folder`` is the institution's. Unless ``registered``, the node key need not be registered yet.
    """
    values = defaultdict(str, host.read_environment(folder / host.INSTITUTION))
    superlink, authority, key_file = values["COORDINATOR"], folder / AUTHORITY, folder / "node"
    report = Report()
    report.line(check_certificate_file, authority, "get the coordinator's new authority.pem")
    has_key = report.line(_readable, key_file)
    if report.line(_reaches, superlink, authority):
        answer = get_health(superlink, authority)
        what = f"the certificate of {superlink}"
        report.line(check_certificate, answer.certificate, what, "the coordinator must renew it")
        report.line(check_filter, superlink, authority)
        if report.line(check_clock, answer.ahead) and has_key and registered:
            report.line(_registered, superlink, authority, key_file)
            report.line(_online, folder)
    report.line(_trusted, folder / host.TRUSTED)
    if report.line(_site, folder / host.SITE):
        site = read_site_file(folder / host.SITE)
        report.line(_policy, site.policy, folder / host.SITE)
        report.line(_sums, site)
        report.line(_data, site, task)
        report.line(_worker, site.worker)
    if model:
        report.line(check_model, model)
    report.line(check_disk, platformdirs.user_state_path("chambers"))
    report.line(check_gpu)
    return report


def _readable(file: Path) -> str:
    read_node_key(file)
    return f"{file} is a node key that Flower can read"


def _registered(superlink: str, authority: Path, file: Path) -> str:
    """Check that the coordinator has registered the node key."""
    if not is_registered(superlink, authority, read_node_key(file)):
        raise CommandError(
            f"{file} is not registered: send {file}.pub to the coordinator, who runs chambers "
            f"site admit {file.name}.pub --name NAME"
        )
    return f"{file} is registered"


def _online(folder: Path) -> str:
    """Check that this institution's SuperNode runs and is in contact with the coordinator."""
    # With ``site up``, in a unit, and from another container.
    places = ["127.0.0.1:9094", "supernode:9094"]
    if (folder / PORT).exists():
        places.insert(0, f"127.0.0.1:{(folder / PORT).read_text()}")
    answer = None
    for place in places:
        with suppress(httpx.HTTPError), httpx.Client(trust_env=False) as client:
            answer = client.get(f"http://{place}/health", timeout=10)
            break
    if answer is None:
        raise AdviceError("the SuperNode isn't running, so this institution can't take part")
    if answer.status_code != 200:
        since = "its start"
        with suppress(ValueError, AttributeError):  # another program may answer at this port
            since = answer.json().get("offline-since", since)
        raise CommandError(
            f"the SuperNode is offline since {since} (UTC), although {folder / 'node'} is "
            "registered: see its log"
        )
    return "the SuperNode is in contact with the coordinator"


def _trusted(file: Path) -> str:
    """Check the keys of trusted reviewers, whose signatures of releases are accepted."""
    keys = read_reviewers(file)
    refuse_foreign(file)
    if not keys:
        raise CommandError(
            f"{file} names no key: the SuperNode refuses to start if the file is empty, and runs "
            "any code if the file contains {}; get trusted.yaml from your reviewer"
        )
    for name, key in keys.items():
        if not isinstance(key, Ed25519PublicKey):
            raise CommandError(
                f"{file}: {name} is not an Ed25519 key: get trusted.yaml from your reviewer"
            )
    return f"{file}: accepts releases signed by {' or '.join(keys)}"


def _site(file: Path) -> str:
    """Check the site file, and that the SuperExec's unit names it."""
    if not file.exists():
        raise CommandError(f"{file} doesn't exist: chambers site update {file.parent} writes it")
    site = read_site_file(file)
    unit = file.parent / "systemd" / "chambers-clientapp.service"
    if unit.exists() and f"{VARIABLE}={file}" not in unit.read_text(encoding="utf-8"):
        raise CommandError(f"{unit} doesn't name {file}: run chambers site update {file.parent}")
    return f"{file}: only root and this user can change it and {site.policy or 'no policy'}"


def _policy(file: str, site: Path) -> str:
    """Check the policy, and that the audit log and the privacy account can be written."""
    if not file:
        raise CommandError(f"{site} names no policy, so the coordinator can request anything")
    policy = read_own_policy(file)
    key, privacy = policy.instruction_key, policy.privacy
    if policy.not_after and policy.not_after < datetime.now(UTC).date():
        raise CommandError(f"{file}: the policy ended on {policy.not_after} (not-after)")
    if not key:
        raise CommandError(
            f"{file} names no instruction-key, so anyone whom the coordinator has registered can "
            "send instructions in the coordinator's name: get instructions.pub from the "
            'coordinator, and add instruction-key = "/srv/chambers/instructions.pub" to the policy'
        )
    read_public_key(key)
    accounts = [] if privacy.epsilon is None else [privacy.account_file]
    for log in (policy.audit_file, *accounts):
        for each in (log, Path(f"{log}.lock"), find_existing(log.parent)):
            if each.exists() and not os.access(each, os.W_OK, effective_ids=True):
                raise CommandError(f"{each} can't be written by this user: check who owns it")
    text = f"{file} is a policy; it accepts instructions whose signatures match {key}"
    if privacy.epsilon is not None:
        spent = PrivacyAccount(policy).spent()
        text += f"; spent: ε = {spent:.3g} of {privacy.epsilon:g} at δ = {privacy.delta:g}"
    return text


def _sums(site: SiteFile) -> str:
    """Check the signed list of groups, this institution's key and group, and ``sums.only``."""
    policy = read_policy(site.policy) if site.policy else None
    if not policy or not policy.sums.key:
        return "sums: the policy has no table [sums]; runs with sums.enabled are refused"
    own = membership(policy.sums)
    group = own.members.group_of(site.name)
    if not group:
        raise CommandError(f"sums: {site.name} is in no group of {policy.sums.members}")
    if own.members.key_of(site.name) != own.key.public_key():
        raise CommandError(
            f"sums: {policy.sums.key} is not the key of {site.name} in {policy.sums.members}: send "
            f"{policy.sums.key}.pub to the reviewer, who signs a new list"
        )
    if len(group) < own.min_size:
        raise CommandError(
            f"sums: the group has {len(group)} members, but min-peers = {own.min_size}"
        )
    check_secret(Path(policy.sums.key))
    text = f"sums: {', '.join(group)} form a group, in {policy.sums.members}"
    if not own.only:
        raise AdviceError(f"{text}; but sums.only = false, which the other members refuse")
    return text


def _data(site: SiteFile, task: str) -> str:
    """Check the institution's data."""
    try:
        settings = DataSettings.model_validate({"task": task})
    except ValidationError as error:
        raise CommandError(f"--task {task}: {error.errors()[0]['msg']}") from error
    try:
        path = Path(site.data_path)
        parts = find_parts(path, held_out_part(settings))
        rows = len(read_task_rows(parts.train, settings))
        held_out = (
            f"{len(read_task_rows(parts.held_out, settings))} held-out rows"
            if parts.held_out
            else "no held-out rows of its own"
        )
    except DataError as error:
        advice = "" if task else "\n  (if the planned run sets data.task, add --task)"
        raise CommandError(f"{error}{advice}") from error
    unused = f"; not used: {list_names(parts.unused)}" if parts.unused else ""
    return f"{site.name}: {rows} training rows and {held_out} in {path}{unused}"


def _worker(socket: str) -> str:
    """Check that the resident worker is running, if the institution has one."""
    if not socket:
        return "worker: none; each message's process loads the model itself"
    try:
        with connected_worker(Path(socket)):
            return f"the worker at {socket} is running"
    except WorkerError as error:
        raise CommandError(
            f"the worker at {socket} {error}; until that is corrected, each message's process "
            "loads the model itself (docs/operations.md)"
        ) from error


def _reaches(superlink: str, authority: Path) -> str:
    get_health(superlink, authority)
    return f"{superlink} answers over TLS"
