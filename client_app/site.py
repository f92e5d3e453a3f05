"""Apply an institution's policy to a message, and record the message in the audit log."""

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
    """An institution's policy for one message; without a policy, nothing is refused or recorded.

    Attributes:
        policy: The institution's policy, if it has one.
        about: Client, kind of message, run and round, for the audit log.
        is_simulated: Whether the client is simulated.

    """

    policy: SitePolicy | None
    about: Mapping[str, Any]
    is_simulated: bool

    def check_run(self, config: RunConfig) -> None:
        """Check a run config before accessing any file or model that it names.

        Raises:
            PolicyError: The policy doesn't allow these settings.

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
        """Check the base model and the size of a round.

        Raises:
            PolicyError: The policy doesn't allow these settings.

        """
        if self.policy:
            checks.check_institution(self.policy, config, institution)

    @property
    def privacy(self) -> PrivacyPolicy | None:
        """The settings of differential privacy, or None if the policy doesn't require it."""
        terms = self.policy.privacy if self.policy else None
        return terms if terms and terms.epsilon is not None else None

    def check_budget(self, config: RunConfig, institution: Institution, finished: int) -> None:
        """Check that the policy's ε is sufficient for the remaining rounds of a run.

        Raises:
            PolicyError: ε is not sufficient.

        """
        if self.privacy:
            rounds = config.rounds - finished
            steps = private_steps(
                policy=self.privacy, settings=config.train, rows=institution.size, rounds=rounds
            )
            PrivacyAccount(self.privacy).check(steps)

    def spend(self, config: RunConfig, institution: Institution) -> PrivateSteps:
        """Record the privacy loss of a round before it is trained; return its steps.

        Raises:
            PolicyError: ε is not sufficient.
            AuditError: The privacy loss can't be recorded.

        """
        assert self.privacy is not None
        steps = private_steps(self.privacy, config.train, institution.size)
        spent = PrivacyAccount(self.privacy).spend(steps, self.about)
        # Include all fields of the account, so that it can be restored from the audit log.
        self.record("privacy", epsilon=spent, delta=self.privacy.delta, **account_line(steps))
        return steps

    def check_steps(
        self, examples: Sequence[Example], steps: Sequence[Sequence[int]], average_every: int
    ) -> None:
        """Check the number of rows used in a round; see ``policy.check_steps``.

        Raises:
            PolicyError: There are too few rows or too many steps.

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
        """Check and count a train or evaluate message; return the instruction that is permitted.

        Raises:
            PolicyError: The policy doesn't allow the message.
            AuditError: The message can't be recorded.

        """
        if self.policy is None:
            return instruction
        policy, kind = self.policy, self.about["kind"]
        # If held-out rows are not used, their number need not be checked.
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
        """Record a signed instruction before it is carried out.

        Args:
            run_id: Flower's id of the run.
            time: Unix time at which the instruction was signed, in seconds.

        Raises:
            AuthenticationError: The instruction, or a newer one, was received before.
            AuditError: The instruction can't be recorded.

        """
        assert self.policy is not None
        line = {"event": "instruction", **self.about, "run-id": str(run_id), "signed": time}
        AuditLog(self.policy.audit_file).append(
            line, check=lambda lines: check_fresh(self.about, run_id, time, lines)
        )

    def check_lane(self, address: str) -> None:
        """Check the address of a block server, and record that a lane is opened.

        Raises:
            PolicyError: The policy doesn't allow the address.
            AuditError: The lane can't be recorded.

        """
        if self.policy:
            checks.check_address(self.policy, address)
            self.record("lane", address=address)

    def record(self, event: str, **facts: Any) -> None:
        """Append a line about this message to the audit log.

        Raises:
            AuditError: The line can't be written.

        """
        if self.policy:
            AuditLog(self.policy.audit_file).append({"event": event, **self.about, **facts})

    def record_reply(self, message: Message, reply: Message) -> None:
        """Append a line that describes the content of a reply.

        Raises:
            AuditError: The line can't be written.

        """
        if self.policy:
            self.record("reply", **describe(message, reply))


def open_site(message: Message, context: Context, instruction: SignedInstruction | None) -> Site:
    """Read the policy named in the SuperNode's configuration, and authenticate the message.

    Args:
        message: The message; its content is replaced with that of the signed instruction.
        context: Flower's context of the message.
        instruction: The signed instruction in the message, if there is one.

    Raises:
        PolicyError: The named policy is missing or malformed, or the configuration has unknown
            keys.
        AuthenticationError: The policy requires a signature, and the message has no valid one for
            this site and time, or was received before.
        AuditError: The message can't be recorded.

    """
    node = context.node_config
    check_keys(node)
    about: dict[str, Any] = {
        "client": str(node.get("name", "")),
        # Flower uses the same handler for "train" and "train.default".
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
    """Authenticate and unpack a message; return the site with the message's run and round."""
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
        pass  # the handler refuses and records it later
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
