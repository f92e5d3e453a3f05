"""The client side of FL-GLM: head and tail are local, and a lane connects them to the body."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from client_app.evaluation import EvaluationResult, save_final_adapters
from client_app.institution import PARTS
from client_app.kept import keep_one
from client_app.task import ClientTask, Metrics, training_metrics
from federation.messages import ARRAYS, BODY, invitation_of, models_of
from finetuning.adapters.adapter import State, initial_adapter, load_state
from finetuning.files import Stamps
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import AdapterSettings, ModelSettings, kebab_case
from finetuning.training.loop import train_round
from split.client.connecting import connect
from split.client.split_model import SplitModel
from split.model.adapters import join_adapters
from split.model.loading import load_parts, locate_parts
from split.model.part import Part
from split.model.partition import PartyName, partition_of
from split.protocol.training import RoundPlan
from split.settings import SplitSettings


def train(task: ClientTask) -> tuple[State, Metrics]:
    """Train the head and tail for one round; the server runs the body.

    Return the local adapters of the head and tail, and the round's metrics. Raise ``LaneError`` if
    the block server can't be reached, or the lane has ended.
    """
    config, local_round = task.config, task.local_round(task.config.split.average_every)
    with _split_model(task, training=True) as model:
        parameters = model.parameters
        load_state(parameters, task.arrays[ARRAYS])
        longest = max(len(example.tokens) for example in task.institution.train)
        model.join(
            RoundPlan(
                steps=len(local_round.steps),
                first_step=local_round.first_step,
                total_steps=local_round.total_steps,
                seed=local_round.seed,
            ),
            max_batch_tokens=config.train.batch_size * (model.columns_before + longest),
            deadline=task.deadline,
            average_every=config.split.average_every,
        )
        report, optimizer = train_round(
            model=model,
            parameters=parameters,
            examples=task.institution.train,
            padding=task.institution.padding,
            local_round=local_round,
            settings=config.train,
            optimizer_state=task.saved_optimizer(),
            description=task.title,
        )
        model.end()
    adapters = {name: p.detach().float().cpu().clone() for name, p in parameters.items()}
    # The body that the server stores for this client matches its last averaged adapter.
    task.save(adapters, optimizer, counted=models_of(task.message).get("personalised"))
    traffic = {kebab_case(key): value for key, value in asdict(model.lane.traffic).items()}
    return adapters, training_metrics(report) | traffic | {"lanes": model.lane.opened}


def evaluate(task: ClientTask) -> EvaluationResult:
    """Evaluate models on held-out data; the server runs the body.

    After the last round, save the whole model's adapters; the message contains the body's part.
    """
    config, rounds = task.config, models_of(task.message)
    adapters: dict[str, State | None] = {"base": None, "global": task.arrays[ARRAYS]}
    personalised = task.state.adapter(rounds.get("personalised", 0))
    if personalised is not None:
        adapters["personalised"] = personalised
    result = EvaluationResult()
    if task.instruction.losses:
        tokenizer = load_tokenizer(task.institution.directory)
        with _split_model(task, training=False) as model:
            for kind in rounds:
                if kind in adapters:
                    model.choose(kind, adapters[kind])
                    result.measure(kind=kind, model=model, tokenizer=tokenizer, task=task)
            model.end()
    if task.instruction.final:
        whole = {
            kind: join_adapters([own, task.arrays[BODY[kind]]])
            for kind, own in adapters.items()
            if kind in rounds and own is not None and BODY[kind] in task.arrays
        }
        directory = task.institution.directory
        _, peft_config = initial_adapter(
            name=config.model.name, settings=config.adapter, seed=0, directory=directory
        )
        save_final_adapters(task, whole, peft_config)
    return result


@keep_one
def _load_parts(
    model: ModelSettings, adapter: AdapterSettings, split: SplitSettings, _files: Stamps
) -> dict[PartyName, Part]:
    """Return the head and the tail with adapters, loaded once per process.

    The adapters still have the weights of the previous message: load new weights before use.
    """
    directory = locate_parts(model.name, split, PARTS)
    parts = load_parts(
        settings=model,
        directory=directory,
        partition=partition_of(directory, split),
        parties=PARTS,
    )
    for part in parts.values():
        part.attach(adapter)
    return parts


@contextmanager
def _split_model(task: ClientTask, training: bool) -> Iterator[SplitModel]:
    config, invitation = task.config, invitation_of(task.message)
    task.site.check_lane(invitation.address)
    parts = _load_parts(config.model, config.adapter, config.split, task.institution.model_files)
    for part in parts.values():
        part.use("default")
    with connect(
        invitation=invitation,
        parts=parts,
        split=config.split,
        max_batch_tokens=config.max_batch_tokens,
        deadline=task.deadline,
        training=training,
        noise=task.site.policy.split.noise if task.site.policy else 0.0,
    ) as model:
        try:
            yield model
        finally:
            model.lane.close()
            traffic = model.lane.traffic
            sent = {"bytes-up": traffic.bytes_up, "bytes-down": traffic.bytes_down}
            task.site.record("lane-closed", address=invitation.address, **sent)
