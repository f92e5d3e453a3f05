"""A client's part of split learning: its round, and its evaluation, over a lane (FL-GLM)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from client_app.evaluation import measured
from client_app.institution import Institution, load_ends
from client_app.state import ClientState
from client_app.training import optimizer_to_go_on_with, place_of, training_metrics
from finetuning.adapters.adapter import State, initial_adapter, load_state, save_adapter
from finetuning.adapters.model_card import model_card
from finetuning.model.base_model import load_tokenizer, reference
from finetuning.training.loop import train_round
from split.client.split_model import ClientRound, SplitModel
from split.lane.dialling import open_lane
from split.model.adapters import join_adapters
from split.protocol.frames import Limits
from split.protocol.invitation import Invitation
from strategies.messages import Instruction
from strategies.run_config import RunConfig


def train_ends(
    institution: Institution,
    config: RunConfig,
    instruction: Instruction,
    arrays: State,
    state: ClientState,
    invitation: Invitation,
) -> tuple[State, dict[str, int | float]]:
    """Train head and tail for one round, with the blocks between at the server.

    Args:
        institution: whose data.
        config: the run's.
        instruction: round and time limit.
        arrays: the global adapters of heads and tails.
        state: where the local adapters and the optimizer are kept.
        invitation: to the block server.

    Returns:
        The local adapters of head and tail, and the round's metrics.

    Raises:
        LaneError: the block server can't be reached, or the lane broke.

    """
    deadline = time.monotonic() + instruction.time_limit
    place = place_of(institution, config, instruction, deadline)
    with _split_model(config, invitation, deadline) as model:
        parameters = model.parameters
        load_state(parameters, arrays)
        longest = max(len(example.tokens) for example in institution.train)
        model.join(
            ClientRound(
                steps=len(place.steps),
                first_step=place.first_step,
                total_steps=place.total_steps,
                longest=config.train.batch_size * (model.columns_before + longest),
                average_every=config.split.average_every,
                deadline=deadline,
            )
        )
        report, optimizer = train_round(
            model,
            parameters,
            institution.train,
            institution.padding,
            place,
            config.train,
            optimizer_state=optimizer_to_go_on_with(institution, config, instruction, state),
            description=f"{institution.name}, round {instruction.round}",
        )
        model.end()
    traffic = model.lane.traffic
    adapters = {name: p.detach().float().cpu().clone() for name, p in parameters.items()}
    keeps = config.train.optimizer_state == "keep"
    state.save(instruction.round, adapters, optimizer if keeps else {})
    return adapters, training_metrics(report) | {
        "bytes-up": traffic.bytes_up,
        "bytes-down": traffic.bytes_down,
        "lanes": model.lane.opened,
        "seconds-waiting": model.seconds_waiting,
        "seconds-crypto": traffic.seconds_crypto,
        "seconds-serialisation": traffic.seconds_serialisation,
    }


def evaluate_split_models(
    institution: Institution,
    config: RunConfig,
    instruction: Instruction,
    arrays: State,
    bodies: dict[str, State],
    state: ClientState,
    invitation: Invitation,
    rounds: dict[str, int],
) -> dict[str, int | float]:
    """Measure models on held-out data with head and tail here and the blocks between at the server.

    Args:
        institution: whose held-out data.
        config: the run's.
        instruction: the round, and what is due.
        arrays: the global adapters of heads and tails.
        bodies: the body's adapters by model, after the last round, to be taken home.
        state: where this client's own adapters are; the final ones are saved beside it.
        invitation: to the block server.
        rounds: the models to evaluate, each with the round that the server's part of it is of.

    Returns:
        Metrics named ``<model>.<metric>``.

    """
    deadline = time.monotonic() + instruction.time_limit
    models: dict[str, State | None] = {"base": None, "global": arrays}
    personalised = state.adapter(rounds.get("personalised", 0))
    if personalised is not None:
        models["personalised"] = personalised
    models = {model: models[model] for model in rounds if model in models}
    metrics: dict[str, int | float] = {}
    if instruction.losses:
        tokenizer = load_tokenizer(institution.directory)
        with _split_model(config, invitation, deadline) as model:
            for kind, adapters in models.items():
                model.choose(kind, adapters)
                metrics |= measured(kind, model, tokenizer, institution, config)
            model.end()
    if instruction.final:
        _keep(models, bodies, institution, config, state)
    return metrics


@contextmanager
def _split_model(
    config: RunConfig, invitation: Invitation, deadline: float
) -> Iterator[SplitModel]:
    ends = load_ends(config.model, config.adapter, config.split)
    for part in ends.values():
        part.use("default")
    limits = Limits(
        hidden=ends["head"].hidden_size,
        wire_dtype=config.split.wire_dtype,
        maximum_tokens=config.longest,
        window=config.split.window,
    )
    lane = open_lane(invitation, limits, deadline, config.split.resume_timeout)
    try:
        yield SplitModel(ends["head"], ends["tail"], lane, config.split.frame_timeout, deadline)
    finally:
        lane.close()


def _keep(
    models: dict[str, State | None],
    bodies: dict[str, State],
    institution: Institution,
    config: RunConfig,
    state: ClientState,
) -> None:
    """Save what the institution takes home, in PEFT's format, on its own disk."""
    _, peft_config = initial_adapter(config.model.name, config.adapter, 0, institution.directory)
    base = reference(config.model.name, institution.directory)
    state.describe(config.flat(), base, institution.fingerprint)
    for kind, adapters in models.items():
        if adapters is None or kind not in bodies:
            continue
        card = model_card(
            f"{kind} adapter of {institution.name}",
            config.model.name,
            base,
            {institution.name: institution.size},
            config.rounds,
            config.flat(),
        )
        whole = join_adapters([adapters, bodies[kind]])
        save_adapter(state.directory / "adapters" / kind, whole, peft_config, card)
