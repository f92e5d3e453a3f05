"""A client's part of masked sums: announcements, groups, and uploads that are made only once.

Two uploads under the same masks would reveal their difference, and even the same computation can
give another result, for example on a GPU. An upload is therefore stored, by the digest of all that
determines it, before the audit log records it and it is sent; a repeated message gets the stored
bytes. If the audit log has a digest whose upload is lost, the message is refused, and the client
announces a new key when it is queried again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from logging import INFO
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from filelock import FileLock
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.common import log
from safetensors.numpy import load_file, save_file

from client_app.audit import AuditLog
from client_app.evaluation import EvaluationResult
from client_app.institution import Institution
from client_app.site import Site
from client_app.state import ClientState
from client_app.task import ClientTask
from federation.authentication import parse_private_key
from federation.messages import ARRAYS, SIZE, SUM, Instruction, make_reply
from federation.run_config import RunConfig
from federation.site_policy import PolicyError, SumsPolicy
from federation.sum_settings import MIN_GROUP
from federation.sums.announcement import (
    GROUP,
    NO_MEMBERS,
    Announcement,
    Group,
    Statement,
    announcements_of,
    check_group,
)
from federation.sums.masks import (
    CHECK,
    Arrays,
    Masks,
    check_array,
    encode_update,
    encode_wide,
    round_digest,
)
from federation.sums.members import Members, SumError, read_signed_members
from federation.sums.uploads import METRICS, encode_metrics
from finetuning.adapters.adapter import State
from finetuning.aggregation.robust_aggregation import counted_sizes, distance, scale_update
from finetuning.files import replacing, write_secret

# Settings that may change when a run is resumed, and don't affect what clients compute.
_ELSEWHERE = {
    *("resume", "output-dir", "report-to", "instruction-key", "initial-adapter", "min-nodes"),
    *("node-timeout", "round-timeout", "sums.members", "keep-rounds"),
}
_KEPT_ROUNDS = 2


@dataclass(frozen=True)
class Membership:
    """What a site's policy says about masked sums."""

    members: Members
    key: Ed25519PrivateKey
    only: bool
    min_size: int


def membership(sums: SumsPolicy) -> Membership:
    """Read a site's list of groups and its key; raise ``SumError`` if one can't be used."""
    try:
        key = parse_private_key(Path(sums.key).read_bytes())
    except OSError as error:
        raise SumError(f"sums.key = {sums.key!r} can't be read: {error.strerror}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SumError(f"sums.key = {sums.key!r} is not the file peer of chambers site join")
    members = read_signed_members(Path(sums.members), Path(sums.reviewers))
    return Membership(members, key, sums.only, sums.min_peers)


def _membership(site: Site) -> Membership | None:
    """Return the site's membership; None in simulation, where nobody signs."""
    if site.is_simulated:
        return None
    sums = site.policy.sums if site.policy else None
    if sums is None or not sums.key:
        raise PolicyError("sums.enabled = true needs a policy with a table [sums] at every site")
    return membership(sums)


def announce(config: RunConfig, site: Site, institution: Institution, lineage: str) -> ConfigRecord:
    """Return this client's announcement; raise ``SumError`` if it is in no list of groups."""
    own = _membership(site)
    if own and not own.members.group_of(institution.name):
        raise SumError(f"{institution.name} is in no group of the site's list of groups")
    state = ClientState(config.state_path, lineage, institution.name)
    with _locked(state):
        key = _run_key(state, create=True)
    assert key is not None
    statement = Statement(
        lineage=lineage,
        name=institution.name,
        members=own.members.digest if own else NO_MEMBERS,
        key=key.public_key().public_bytes_raw().hex(),
        rows=institution.size,
        only=own.only if own else True,
        evaluates=site.evaluates,
        importance=site.privacy is None,
    )
    return Announcement.sign(statement, own.key if own else None).to_record()


def group_of(message: Message, site: Site, name: str) -> Group:
    """Return the group in a train or evaluate message; raise ``SumError`` if it isn't safe."""
    own, instruction = _membership(site), Instruction.of(message)
    announcements = announcements_of(message.content.config_records.get(GROUP))
    members, min_size = (own.members, own.min_size) if own else (None, MIN_GROUP)
    return check_group(announcements, name, instruction.lineage, members, min_size)


def permitted_by(group: Group, instruction: Instruction, kind: str) -> Instruction:
    """Return the instruction without what a member of the group doesn't permit in sums."""
    if kind == "train":  # the client's own J stays at the client
        return instruction
    return replace(
        instruction,
        losses=instruction.losses and group.evaluates,
        importance=instruction.importance and group.importance,
    )


def update_arrays(task: ClientTask, adapter: State) -> Arrays:
    """Return this client's part of the sum of changes, without masks."""
    received, settings = task.arrays[ARRAYS], task.config.sums
    norm = distance(adapter, received)
    if settings.max_distance and norm > settings.max_distance:
        adapter = scale_update(adapter, received, settings.max_distance / norm)
    share = _share(task)
    return {
        name: encode_update(value.numpy() - received[name].double().numpy(), share, settings.bound)
        for name, value in adapter.items()
    }


def evaluation_arrays(task: ClientTask, result: EvaluationResult) -> Arrays:
    """Return this client's part of the sums of J and of metrics, without masks."""
    share = _share(task)
    importance = result.importance or {}
    arrays: Arrays = {name: encode_wide(v.numpy(), share) for name, v in importance.items()}
    if task.instruction.losses:
        arrays[METRICS] = encode_metrics(result.metrics, share)
    return arrays


def reply_once(task: ClientTask, compute: Callable[[], Arrays]) -> Message:
    """Reply with the masked arrays that ``compute`` returns, or with those stored before.

    Raise ``SumError`` if the masks were used before, or the run's key has changed.
    """
    digest = _digest(task).hex()
    kind, number = task.site.about["kind"], task.instruction.round
    file = task.state.directory / "sums" / f"{number:04d}-{kind}-{digest}.safetensors"
    with _locked(task.state):
        if file.exists():
            log(INFO, "%s: the stored upload is sent again", task.title)
        else:
            _upload(task, digest, compute, file)
        if task.instruction.final:
            _key_file(task.state).unlink(missing_ok=True)
        upload = load_file(file)
    config = {"name": task.institution.name, "base": task.instruction.base, SUM: digest}
    arrays = ArrayRecord({name: Array(upload[name]) for name in sorted(upload)})
    return make_reply(task.message, config, {SIZE: task.institution.size}, arrays)


def _upload(task: ClientTask, digest: str, compute: Callable[[], Arrays], file: Path) -> None:
    """Compute and mask an upload, and write it to a file, before anything is sent."""
    group, name = _group(task), task.institution.name
    key = _run_key(task.state)
    if _was_sent(task, digest):
        _key_file(task.state).unlink(missing_ok=True)
        raise SumError(
            "an upload under the same masks was sent, but is no longer stored; resume the run, in "
            "which this client will have a new key"
        )
    own = group.announcements[name].statement
    if key is None or own.key != key.public_key().public_bytes_raw().hex():
        raise SumError("the group has an old key of this client; resume the run")
    if own.rows != task.institution.size:
        raise SumError("the number of rows has changed since this client announced it")
    peers = {n: each.statement.key for n, each in group.announcements.items() if n != name}
    masks = Masks(bytes.fromhex(digest), name, key, peers)
    try:
        arrays = compute()
    except FloatingPointError as error:  # its text may contain a loss
        raise FloatingPointError(
            "training or evaluation gave numbers that are not finite"
        ) from error
    arrays[CHECK] = check_array(_weights(task)[name])
    masks.add_to(arrays)
    with replacing(file) as aside:
        save_file(arrays, aside)
    for old in file.parent.glob("*.safetensors"):
        if int(old.name.partition("-")[0]) <= task.instruction.round - _KEPT_ROUNDS:
            old.unlink()


def _digest(task: ClientTask) -> bytes:
    facts = {
        "kind": task.site.about["kind"],
        "instruction": {**asdict(Instruction.of(task.message)), "time_limit": 0.0},
        "config": {k: v for k, v in task.config.flat().items() if k not in _ELSEWHERE},
    }
    return round_digest(
        facts,
        {name: {k: v.numpy() for k, v in state.items()} for name, state in task.arrays.items()},
        [each.text for each in _group(task).announcements.values()],
    )


def _group(task: ClientTask) -> Group:
    assert task.group is not None
    return task.group


def _weights(task: ClientTask) -> dict[str, int]:
    """Return the weights of the group's members, which the coordinator can't change."""
    return counted_sizes(_group(task).rows, task.config.max_share)


def _share(task: ClientTask) -> float:
    weights = _weights(task)
    return weights[task.institution.name] / sum(weights.values())


def _was_sent(task: ClientTask, digest: str) -> bool:
    policy, client = task.site.policy, task.institution.name
    lines = AuditLog(policy.audit_file).lines() if policy else ()
    return any((line.get(SUM), line.get("client")) == (digest, client) for line in lines)


def _key_file(state: ClientState) -> Path:
    return state.directory / "sum-key"


def _run_key(state: ClientState, create: bool = False) -> X25519PrivateKey | None:
    """Return the client's key for a run, or None if there is none; it is as secret as the rows."""
    file = _key_file(state)
    if not file.exists():
        if not create:
            return None
        write_secret(file, X25519PrivateKey.generate().private_bytes_raw())
    return X25519PrivateKey.from_private_bytes(file.read_bytes())


@contextmanager
def _locked(state: ClientState) -> Iterator[None]:
    """Exclude other processes from a client's key and uploads in a run."""
    state.directory.mkdir(parents=True, exist_ok=True)
    with FileLock(state.directory / "sums.lock", mode=0o600):
        yield
