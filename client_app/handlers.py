"""The ClientApp: answers query, train and evaluate messages."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from logging import ERROR, INFO
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common import log

from client_app import fedjudge, fl_glm, masked_sums
from client_app.audit import describe_reply
from client_app.data import client_name, own_rank
from client_app.institution import Institution, base_model_of, open_institution
from client_app.policy import check_institution
from client_app.site import Site, open_site, settings_of
from client_app.state import ClientState
from client_app.task import ClientTask, Metrics
from federation.authentication import AuthenticationError, SignedInstruction
from federation.messages import (
    ANSWERS,
    AUDIT,
    CONFIG,
    RANK,
    SIZE,
    TRAIN_EXAMPLES,
    Instruction,
    answers_record,
    from_arrays,
    make_reply,
    one_line,
    to_arrays,
)
from federation.run_config import RunConfig, parse_run_config
from federation.sums.announcement import ANNOUNCEMENT
from finetuning.adapters.adapter import State
from finetuning.devices import memory_problem
from finetuning.errors import BaseModelError, UserError
from finetuning.model.fingerprint import combine_digests

app = ClientApp()

Handler = Callable[[Message, Context], Message]
_MEMORY = (
    "lower train.batch-size, evaluate.batch-size or data.max-length, or, with LoRA, set "
    "model.gradient-checkpointing = true"
)
_WITHHELD = "metrics are not sent: the site's policy demands differential privacy (privacy.epsilon)"


def _guarded(handler: Callable[[Message, Context, Site], Message]) -> Handler:
    """Decorate a handler so that every reply complies with the policy and is in the audit log.

    Errors are converted to replies, because Flower would send their text, which may quote private
    rows. If the message is a signed instruction, all replies are authenticated, even refusals.
    """

    @wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        received = message.content
        try:
            site = open_site(message, context)
            try:
                reply = handler(message, context, site)
            except Exception as error:
                reply = _problem(message, context, error)
            if site.policy:
                line, digest = site.record("reply", **describe_reply(message, reply))
                reply.content[AUDIT] = ConfigRecord({"line": line, "digest": digest})
        except UserError as error:
            reply = _problem(message, context, error)
        with suppress(AuthenticationError):
            if instruction := SignedInstruction.of(received):
                instruction.authenticate(reply)
        return reply

    return handle


def _problem(message: Message, context: Context, error: Exception) -> Message:
    """Log an error, and reply with the part that may be sent to the coordinator."""
    text = _reason(error)
    log(ERROR, "%s", text, exc_info=None if text == one_line(str(error)) else error)
    name = ""
    with suppress(UserError):
        name = str(settings_of(context).get("name", ""))
    return make_reply(message, {"name": name, "problem": text})


def _reason(error: Exception) -> str:
    """Return an error text that quotes no private rows."""
    if isinstance(error, UserError):
        return one_line(error.public)  # may quote the server
    if isinstance(error, FloatingPointError):  # raised in training
        return one_line(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return memory_problem(error, _MEMORY)
    if isinstance(error, torch.AcceleratorError):
        return "a kernel failed on the GPU; this SuperNode's log has the details"
    about = f": {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else ""
    return f"{type(error).__name__}{about}; this SuperNode's log has the details"


@app.query()
@_guarded
def query(message: Message, context: Context, site: Site) -> Message:
    """Check all data; reply with the client's name and data size, and the base model's digests.

    If only names are requested, a simulated client doesn't read its data.
    """
    instruction = Instruction.of(message)
    if instruction.name_only and site.is_simulated:
        config = parse_run_config(context.run_config)
        _, digests = base_model_of(config)
        return make_reply(message, _about(client_name(config.data, site.node), digests))
    config, institution = _open(context, site, instruction)
    site.check_budget(config, institution, instruction.round)
    about = _about(institution.name, institution.fingerprint)
    counts = {SIZE: institution.size}
    if config.adapter.ranks:
        counts[RANK] = config.adapter.rank
    if site.privacy:
        about["withheld"] = _WITHHELD
    else:
        counts |= {TRAIN_EXAMPLES: len(institution.train), "test-examples": len(institution.test)}
    reply = make_reply(message, about, counts)
    if config.sums.enabled:
        own = masked_sums.announce(config, site, institution, instruction.lineage)
        reply.content[ANNOUNCEMENT] = own
    return reply


@app.train()
@_guarded
def train(message: Message, context: Context, site: Site) -> Message:
    """Train the global adapter on private data, and reply with the local adapter."""
    task = _task(message, context, site)
    run = fl_glm.train if task.config.method.is_split else fedjudge.train
    if task.group:
        return masked_sums.reply_once(task, lambda: masked_sums.update_arrays(task, run(task)[0]))
    adapter, metrics = run(task)
    return _reply(task, metrics, adapter)


@app.evaluate()
@_guarded
def evaluate(message: Message, context: Context, site: Site) -> Message:
    """Evaluate models on held-out data, and compute J if requested."""
    task = _task(message, context, site)
    run = fl_glm.evaluate if task.config.method.is_split else fedjudge.evaluate
    if task.group:
        return masked_sums.reply_once(task, lambda: masked_sums.evaluation_arrays(task, run(task)))
    result = run(task)
    reply = _reply(task, result.metrics, result.importance)
    reply.content.config_records[CONFIG].update(result.release)
    if result.answers:
        reply.content[ANSWERS] = answers_record(result.answers)
    return reply


def _about(name: str, fingerprint: Mapping[str, str]) -> dict[str, Any]:
    return {"name": name, "tensors": list(fingerprint), "digests": list(fingerprint.values())}


def _open(context: Context, site: Site, instruction: Instruction) -> tuple[RunConfig, Institution]:
    config = parse_run_config(context.run_config)
    if instruction.targets:
        config = config.with_targets(instruction.targets)
    if config.adapter.ranks:
        config = config.with_rank(own_rank(config, site.node))
    site.check_run(config)
    institution = open_institution(config, site.node)
    if site.policy:
        check_institution(site.policy, config, institution)
    return config, institution


def _task(message: Message, context: Context, site: Site) -> ClientTask:
    """Prepare the task of a train or evaluate message, and check that it is permitted."""
    started = time.monotonic()
    instruction = Instruction.of(message)
    config, institution = _open(context, site, instruction)
    if combine_digests(institution.fingerprint) != instruction.base:
        raise BaseModelError(
            f"the base model in {institution.directory} is not the run's: it was changed or "
            "replaced after the run began"
        )
    group = None
    if config.sums.enabled:
        group = masked_sums.group_of(message, site, institution.name)
        instruction = masked_sums.permitted_by(group, instruction, site.about["kind"])
    permitted = site.accept(instruction, config, institution)
    log(INFO, "%s is ready in %.1f s", institution.name, time.monotonic() - started)
    return ClientTask(
        message=message,
        instruction=permitted,
        config=config,
        institution=institution,
        site=site,
        state=ClientState(config.state_path, instruction.lineage, institution.name),
        arrays={name: from_arrays(a) for name, a in message.content.array_records.items()},
        # Reading and tokenizing count towards the client's time limit.
        deadline=started + instruction.time_limit,
        group=group,
    )


def _reply(task: ClientTask, metrics: Metrics, arrays: State | None) -> Message:
    config = {"name": task.institution.name, "base": task.instruction.base}
    if task.site.privacy:
        # Metrics are computed from private rows without noise.
        metrics, config["withheld"] = {}, _WITHHELD
    elif task.instruction.losses != Instruction.of(task.message).losses:
        config["withheld"] = "the site's policy refuses evaluation (evaluation = false)"
    if task.site.policy and task.site.policy.min_rows > 1:
        # These come from single steps, which may have fewer rows than the policy's minimum.
        single = {"loss-first", "loss-last"}
        if task.config.continual.share:  # the gradient of the last step then determines λ
            single |= {"lambda", "penalty"}
        metrics = {name: value for name, value in metrics.items() if name not in single}
    return make_reply(
        message=task.message,
        config=config,
        metrics={SIZE: task.institution.size, **metrics},
        arrays=None if arrays is None else to_arrays(arrays),
    )
