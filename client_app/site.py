"""An institution's own decisions about a message: what its policy refuses, and what it records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any

from flwr.app import Context, Message
from flwr.common import log

from client_app import policy as checks
from client_app.audit import AuditLog, describe
from client_app.authenticity import authenticate, check_fresh
from client_app.institution import Institution
from client_app.privacy_account import PrivacyAccount, PrivateSteps, account_line, private_steps
from federation.authentication import AuthenticationError, SignedInstruction
from federation.messages import Instruction, InstructionError
from federation.node_config import check_keys, is_simulation
from federation.run_config import RunConfig, Scalar
from federation.site_policy import PolicyError, PrivacyPolicy, SitePolicy, read_policy
from finetuning.data.tokenization import Example


@dataclass(frozen=True)
class Site:
    """The policy, applied to one message; without one nothing is refused or recorded.

    Attributes:
        policy: The institution's policy, if it has one.
        about: Client, kind of message, run and round, for the audit log.
        is_simulated: Whether this is one of the clients of a simulation.

    """

    policy: SitePolicy | None
    about: Mapping[str, Any]
    is_simulated: bool

    def check_run(self, config: RunConfig) -> None:
        """Check a run config before anything that it names is looked at.

        Raises:
            PolicyError: The policy doesn't allow it.

        """
        if self.policy:
            checks.check_run(self.policy, config)
        elif config.evaluate.shown and not self.is_simulated:
            raise PolicyError(
                f"evaluate.show-answers = {config.evaluate.show_answers}: text of rows leaves a "
                "site only if its policy has show-answers = true, and this SuperNode's "
                "--node-config names no policy"
            )

    def check_institution(self, config: RunConfig, institution: Institution) -> None:
        """Check the base model and a round's size.

        Raises:
            PolicyError: The policy doesn't allow it.

        """
        if self.policy:
            checks.check_institution(self.policy, config, institution)

    @property
    def privacy(self) -> PrivacyPolicy | None:
        """The terms of differential privacy, if the policy demands it."""
        terms = self.policy.privacy if self.policy else None
        return terms if terms and terms.epsilon is not None else None

    def check_budget(self, config: RunConfig, institution: Institution, finished: int) -> None:
        """Check that ε suffices for the rounds of a run that are not finished.

        Raises:
            PolicyError: It doesn't.

        """
        if self.privacy:
            rounds = config.rounds - finished
            steps = private_steps(
                policy=self.privacy, settings=config.train, rows=institution.size, rounds=rounds
            )
            PrivacyAccount(self.privacy).check(steps)

    def spend(self, config: RunConfig, institution: Institution) -> PrivateSteps:
        """Record that a round is trained with differential privacy, before it is.

        Raises:
            PolicyError: ε doesn't suffice.
            AuditError: It can't be recorded.

        """
        assert self.privacy is not None
        steps = private_steps(self.privacy, config.train, institution.size)
        spent = PrivacyAccount(self.privacy).spend(steps, self.about)
        # With everything that the account says, which can so be restored.
        self.record("privacy", epsilon=spent, delta=self.privacy.delta, **account_line(steps))
        return steps

    def check_steps(
        self, examples: Sequence[Example], steps: Sequence[Sequence[int]], average_every: int
    ) -> None:
        """Check the rows that a round trains on; see ``policy.check_steps``.

        Raises:
            PolicyError: They are too few.

        """
        if self.policy:
            checks.check_steps(
                policy=self.policy, examples=examples, steps=steps, average_every=average_every
            )

    def accept(
        self,
        instruction: Instruction,
        config: RunConfig,
        institution: Institution,
        computes_importance: bool,
    ) -> Instruction:
        """Check and count a train or evaluate message; return the part that the policy permits.

        Raises:
            PolicyError: The policy doesn't allow it.
            AuditError: It can't be recorded.

        """
        if self.policy is None:
            return instruction
        policy, kind = self.policy, self.about["kind"]
        # Held-out rows that are not used needn't be many.
        measured = policy.evaluation and self.privacy is None
        instruction = replace(instruction, losses=instruction.losses and measured)
        checks.check_request(
            policy=policy,
            kind=kind,
            instruction=instruction,
            config=config,
            institution=institution,
            computes_importance=computes_importance,
        )
        AuditLog(policy.audit_file).append(
            {"event": "accepted", **self.about},
            check=lambda lines: checks.check_counts(policy, self.about, lines),
        )
        return instruction

    def receive(self, run_id: int, time: float) -> None:
        """Record a signed instruction, before anything is done about it.

        Args:
            run_id: Flower's id of the run.
            time: When the instruction was signed, in seconds since 1970.

        Raises:
            AuthenticationError: It was received before, or a newer one was.
            AuditError: It can't be recorded.

        """
        assert self.policy is not None
        line = {"event": "instruction", **self.about, "run-id": str(run_id), "signed": time}
        AuditLog(self.policy.audit_file).append(
            line, check=lambda lines: check_fresh(self.about, run_id, time, lines)
        )

    def check_lane(self, address: str) -> None:
        """Check the address of a block server, and record that a lane to it is opened.

        Raises:
            PolicyError: The policy doesn't allow it.
            AuditError: It can't be recorded.

        """
        if self.policy:
            checks.check_address(self.policy, address)
            self.record("lane", address=address)

    def record(self, event: str, **facts: Any) -> None:
        """Append a line about this message to the audit log.

        Raises:
            AuditError: It can't be written.

        """
        if self.policy:
            AuditLog(self.policy.audit_file).append({"event": event, **self.about, **facts})

    def record_reply(self, message: Message, reply: Message) -> None:
        """Append a line with what a reply contains.

        Raises:
            AuditError: It can't be written.

        """
        if self.policy:
            self.record("reply", **describe(message, reply))


def open_site(message: Message, context: Context, instruction: SignedInstruction | None) -> Site:
    """Read the policy that the SuperNode's configuration names, and open the message.

    Args:
        message: The message; its content is replaced by what a signed instruction contains.
        context: Flower's context of the message.
        instruction: The signed instruction in it, if it has one.

    Raises:
        PolicyError: The policy is named, and missing or malformed; or the configuration has other
            keys.
        AuthenticationError: The policy names the coordinator's key, and the coordinator hasn't
            signed the message for this site and this time; or it was answered before.
        AuditError: That it was received can't be recorded.

    """
    node = context.node_config
    check_keys(node)
    about: dict[str, Any] = {
        "client": str(node.get("name", "")),
        # Flower calls the same handler for "train" and "train.default".
        "kind": message.metadata.message_type.partition(".")[0],
    }
    site = Site(_policy_of(node), about, is_simulation(node))
    try:
        return _opened(site, message, context, instruction)
    except AuthenticationError as error:
        site.record("refused", problem=str(error))
        raise


def _opened(
    site: Site, message: Message, context: Context, instruction: SignedInstruction | None
) -> Site:
    """Authenticate and open a message; return the site with what it says of run and round."""
    policy, about = site.policy, dict(site.about)
    if policy and policy.instruction_key:
        authenticate(policy, message, context, instruction)
    if instruction:
        message.content = instruction.content()
        digest = instruction.statement.digest
        about |= {"nonce": instruction.statement.nonce, "digest": digest}
    try:
        asked = Instruction.of(message)
        about |= {"run": asked.lineage, "round": asked.round}
    except InstructionError:
        pass  # it is refused later, with a line in the log
    site = replace(site, about=about)
    if policy and policy.instruction_key and instruction:
        site.receive(context.run_id, instruction.statement.time)
    return site


def _policy_of(node: Mapping[str, Scalar]) -> SitePolicy | None:
    path = node.get("policy")
    if path is None:
        if not is_simulation(node):
            log(
                WARNING,
                "This SuperNode's --node-config names no policy, so whatever the coordinator asks "
                "is done; see docs/policy.md",
            )
        return None
    if not isinstance(path, str):
        raise PolicyError(f"policy = {path!r} in --node-config must be the path of a file")
    return read_policy(path)
