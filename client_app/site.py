"""Apply an institution's policy to a message, and record the message in the audit log."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.common import log

from client_app import policy as checks
from client_app.audit import AuditLog
from client_app.institution import Institution
from client_app.privacy_account import LINE, PrivacyAccount, PrivateSteps, private_steps
from client_app.row_ledger import record_rows
from client_app.state import ClientState
from federation.authentication import AuthenticationError, SignedInstruction, read_public_key
from federation.messages import Instruction, InstructionError
from federation.run_config import RunConfig, Scalar
from federation.site_file import VARIABLE, own_settings, read_own_policy
from federation.site_policy import PolicyError, PrivacyPolicy, SitePolicy
from finetuning.adapters.model_card import licence_of
from finetuning.model.names import public_name

# Keys that Flower sets in simulations.
_PARTITION_KEYS = {"partition-id", "num-partitions"}
# Name of the program that a SuperNode, or its SuperExec, starts to run a ClientApp.
_DEPLOYED = "flwr-clientapp"


@dataclass(frozen=True)
class Site:
    """An institution's policy, and the message to which the policy is applied."""

    policy: SitePolicy | None  # None: nothing is recorded; requests for rows' text are refused
    node: Mapping[str, Scalar]  # settings of this node; see ``settings_of``
    about: Mapping[str, Any]  # client, kind of message, run and round, for the audit log
    is_simulated: bool

    def check_run(self, config: RunConfig) -> None:
        """Raise ``PolicyError`` for settings that aren't allowed; see ``policy.check_run``.

        Also check which modules of the base model are adapted; see ``policy.check_adapter``.
        """
        if self.policy:
            checks.check_run(self.policy, config)
            checks.check_adapter(self.policy, config)
        elif config.evaluate.shown and not self.is_simulated:
            raise PolicyError(
                f"evaluate.show-answers = {config.evaluate.show_answers}: text of rows leaves a "
                "site only if its policy has show-answers = true, but this site's file names no "
                "policy"
            )

    @property
    def privacy(self) -> PrivacyPolicy | None:
        """The settings of differential privacy, or None if the policy doesn't require it."""
        terms = self.policy.privacy if self.policy else None
        return terms if terms and terms.epsilon is not None else None

    @property
    def evaluates(self) -> bool:
        """Whether models may be evaluated on the held-out rows."""
        return self.policy is None or (self.policy.evaluation and self.privacy is None)

    def check_budget(self, config: RunConfig, institution: Institution, finished: int) -> None:
        """Raise ``PolicyError`` if the policy's ε doesn't suffice for a run's remaining rounds."""
        if self.policy and self.privacy:
            state = ClientState(config.state_path, self.about["run"], institution.name)
            begun = state.private_round()
            is_paid = begun and begun.round == finished + 1 and self.has_spent(begun.id)
            rounds = config.rounds - finished - bool(is_paid)
            steps = private_steps(self.privacy, config.train, institution.size, rounds)
            PrivacyAccount(self.policy).check(steps)

    def has_spent(self, draw: str) -> bool:
        """Return whether ε was recorded for a round's draw, and no adapter was sent since."""
        assert self.policy is not None
        about, has_spent = {k: self.about[k] for k in ("client", "run")}, False
        for line in AuditLog(self.policy.audit_file).lines():
            if line.get("draw") == draw:
                has_spent = True
            if line.get("kind") == "train" and "arrays" in line and line.items() >= about.items():
                has_spent = False
        return has_spent

    def spend(self, config: RunConfig, institution: Institution, draw: str) -> PrivateSteps:
        """Record the privacy loss of a round before training; return the steps of the round.

        A round that continues has the same ``draw``, and isn't recorded again. Raise
        ``PolicyError`` if ε doesn't suffice, or ``AuditError`` if a file can't be written.
        """
        assert self.policy is not None and self.privacy is not None
        steps = private_steps(self.privacy, config.train, institution.size)
        if not self.has_spent(draw):
            spent = PrivacyAccount(self.policy).spend(steps, self.about)
            # Include all fields of the account, so that it can be restored from the audit log.
            facts = {"epsilon": spent, "delta": self.privacy.delta}
            facts |= LINE.dump_python(steps, by_alias=True)
            self.record("privacy", draw=draw, **facts)
        return steps

    def accept(
        self, instruction: Instruction, config: RunConfig, institution: Institution
    ) -> Instruction:
        """Check and count a message; return its instruction, without losses if they are refused.

        Raise ``PolicyError`` if the message isn't allowed, or ``AuditError`` if recording fails.
        """
        if self.policy is None:
            return instruction
        policy = self.policy
        # If held-out rows are not used, their number need not be checked.
        instruction = replace(instruction, losses=instruction.losses and self.evaluates)
        checks.check_request(policy, self.about["kind"], instruction, config, institution)
        tests_leaks = instruction.final and policy.release.is_set
        used = institution.rows_used(self.about["kind"], instruction, tests_leaks)
        directory, name = institution.directory, public_name(config.model.name)
        facts: dict[str, Any] = {"model": name, "licence": licence_of(directory)}
        if used:
            facts |= {"rows": len(used), "row-set": record_rows(policy, used)}
        AuditLog(policy.audit_file).append(
            {"event": "accepted", **self.about, **facts},
            check=lambda lines: checks.check_counts(policy, self.about, lines),
        )
        return instruction

    def check_lane(self, address: str) -> None:
        """Check the address of a block server, and record that a lane is opened.

        Raise ``PolicyError`` if the address isn't allowed, or ``AuditError`` if recording fails.
        """
        if self.policy:
            checks.check_address(self.policy, address)
            self.record("lane", address=address)

    def record(self, event: str, **facts: Any) -> tuple[int, str]:
        """Append a line about this message to the audit log; return its number and digest.

        Raise ``AuditError`` on failure. Without a policy, there is no audit log.
        """
        if self.policy is None:
            return 0, ""
        return AuditLog(self.policy.audit_file).append({"event": event, **self.about, **facts})


def open_site(message: Message, context: Context) -> Site:
    """Read this node's settings and its policy, and authenticate the message.

    The content of a signed instruction replaces the message's. Raise ``PolicyError`` if the site
    file, the policy or its public key is missing or malformed. Raise ``AuthenticationError`` if
    Flower's node config differs from the site file, if the signed instruction is malformed, or if
    the policy requires a signature and the message has no valid one or is a replay. Raise
    ``AuditError`` if the message can't be recorded.
    """
    node = settings_of(context)
    # Flower uses the same handler for "train" and "train.default".
    kind = message.metadata.message_type.partition(".")[0]
    about = {"client": str(node.get("name", "")), "kind": kind}
    policy = _policy_of(node, context)
    if policy:
        terms = {"purpose": policy.purpose, "agreement": policy.agreement}
        about |= {key: value for key, value in terms.items() if value}
    site = Site(policy, node, about, _is_simulated(context))
    try:
        _check_node_config(context, node)
        return _opened(site, message, context)
    except AuthenticationError as error:
        site.record("refused", problem=str(error))
        raise


def settings_of(context: Context) -> Mapping[str, Scalar]:
    """Return this node's settings: ``name``, ``data-path``, ``policy`` and ``worker``.

    In a simulation, return Flower's partition keys instead. Raise ``PolicyError`` if the site file
    can't be used.
    """
    return own_settings(context.node_config, deployed=_is_deployed())


def _check_node_config(context: Context, node: Mapping[str, Scalar]) -> None:
    """Raise ``AuthenticationError`` if Flower's node config has values that aren't the site's."""
    differing = sorted(k for k, v in context.node_config.items() if node.get(k) != v)
    if differing:
        raise AuthenticationError(
            f"Flower's node config differs from the site file ({', '.join(differing)}): start the "
            "SuperNode without --node-config; if it was, another user of this machine has changed "
            "Flower's context"
        )


def _opened(site: Site, message: Message, context: Context) -> Site:
    """Authenticate and unpack a message; return the site with the message's run and round."""
    policy, about = site.policy, dict(site.about)
    instruction = SignedInstruction.of(message.content)
    if policy and policy.instruction_key:
        key = read_public_key(policy.instruction_key)
        if instruction is None:
            raise AuthenticationError(
                "the instruction is not signed, but the site's policy has an instruction-key"
            )
        instruction.verify(key, message, context)
    if instruction:
        message.content = instruction.content()
        about |= {"nonce": instruction.statement.nonce, "digest": instruction.statement.digest}
    try:
        asked = Instruction.of(message)
        about |= {"run": asked.lineage, "round": asked.round}
    except InstructionError:
        pass  # the handler later refuses and records the message
    if policy and policy.instruction_key and instruction:
        run_id, time = context.run_id, instruction.statement.time
        AuditLog(policy.audit_file).append(
            {"event": "instruction", **about, "run-id": str(run_id), "signed": time},
            check=lambda lines: _check_fresh(about, run_id, time, lines),
        )
    return replace(site, about=about)


def _check_fresh(
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


def _policy_of(node: Mapping[str, Scalar], context: Context) -> SitePolicy | None:
    path = node.get("policy")
    if path is None:
        if not _is_simulated(context):
            log(
                WARNING,
                "This site's file names no policy, so the coordinator can request anything; see "
                "docs/policy.md",
            )
        return None
    return read_own_policy(str(path))


def _is_deployed() -> bool:
    """Return whether a SuperExec has started this process."""
    return Path(sys.argv[0]).name == _DEPLOYED


def _is_simulated(context: Context) -> bool:
    """Return whether a client is simulated, and so has no rows of its own."""
    has_site = VARIABLE in os.environ or _is_deployed()
    return not has_site and context.node_config.keys() == _PARTITION_KEYS
