"""Stacked training equals training with separate heads and tails, even if clients leave."""

import time
from collections.abc import Mapping

import pytest
import torch

from finetuning.adapters.adapter import exported_names, load_state, trainable_parameters
from finetuning.data.batching import collate, micro_batches
from finetuning.training.optimization import learning_rate, make_optimizer
from split.model.adapters import join_adapters, take_apart
from split.model.partition import partition_of
from split.protocol.frames import Kind, Padding
from split.protocol.training import HeadOutput
from split.server.schedules.stacked_micro_batch import stack
from tests.marks import nightly
from tests.split.clients import (
    SIZES,
    STEPS,
    TRAIN,
    Client,
    assert_close,
    assert_nothing_is_left,
    round_of,
    serving,
    split_settings,
    stop_after,
    train_together,
    whole_model,
)

# Unequal micro-batches: one row or three at a time, so that there are unequally many, too.
SETTINGS = {
    "alpha": TRAIN,
    "beta": TRAIN.model_copy(update={"batch_size": 1}),
    "gamma": TRAIN.model_copy(update={"batch_size": 3}),
}
# Of these the server allows the most micro-batches.
SERVER = TRAIN.model_copy(update={"accumulation": 6})


def batches_of(name: str, step: list[int]):
    examples, _ = round_of(name)
    lengths = [len(example.tokens) for example in examples]
    groups = micro_batches(step, lengths, SETTINGS[name].batch_size * max(lengths))
    return [collate([examples[i] for i in group], 0) for group in groups]


class Reference:
    """One whole model, into which each client's head and tail are loaded in turn."""

    def __init__(self, base, state, split) -> None:
        self.model = whole_model(base, state)
        names = exported_names(self.model.peft_model)
        parameters = trainable_parameters(self.model.peft_model)
        self.parameters = {names[name]: p for name, p in parameters.items()}
        parts = take_apart(self.parameters, partition_of(base, split))
        self.body, self.ends = parts["body"], join_adapters([parts["head"], parts["tail"]])
        self.own = {
            name: {n: state[n].clone().to(p.device) for n, p in self.ends.items()} for name in SIZES
        }
        self.moments = {
            name: make_optimizer(
                {n: torch.nn.Parameter(v) for n, v in self.own[name].items()}, TRAIN
            )
            for name in SIZES
        }
        self.optimizer = make_optimizer(self.body, TRAIN)
        self.rate = learning_rate(TRAIN, STEPS)
        self.losses: dict[str, list[float]] = {name: [] for name in SIZES}

    def gradients(self, name: str, batches, targets: int) -> dict[str, torch.Tensor]:
        """Return the gradients of some micro-batches' losses, averaged over the client's step."""
        load_state(self.ends, self.own[name])
        for parameter in self.parameters.values():
            parameter.grad = None
        found = sum(len(batch.labels) for batch in batches)
        losses = self.model.accumulate(batches, 0)
        self.losses[name].append(sum(losses) / targets)
        return {n: p.grad * (found / targets) for n, p in self.parameters.items()}

    def step(self, index: int, finished: Mapping[str, int | None]) -> None:
        """Take a step; ``finished`` is a leaving client's number of micro-batches, else None."""
        counted = 0
        squares = 0.0
        body = {name: torch.zeros_like(p) for name, p in self.body.items()}
        ends = {}
        for name, count in finished.items():
            batches = batches_of(name, round_of(name)[1].steps[index])
            targets = sum(len(batch.labels) for batch in batches)
            if count == 0:
                continue
            chosen = batches[:count]
            gradients = self.gradients(name, chosen, targets)
            counted += sum(len(batch.labels) for batch in chosen)
            for n in body:
                body[n] += gradients[n] * targets
            if count is None:
                ends[name] = {n: gradients[n] for n in self.ends}
                squares += sum(float(g.square().sum()) for g in ends[name].values())
        for n in body:
            body[n] /= counted
        norm = (squares + sum(float(g.square().sum()) for g in body.values())) ** 0.5
        factor = min(1.0, TRAIN.max_gradient_norm / (norm + 1e-6))
        for n, parameter in self.body.items():
            parameter.grad = body[n] * factor
        self.take(self.optimizer, index)
        for name, gradients in ends.items():
            for parameter, gradient in zip(
                self.moments[name].param_groups[0]["params"], gradients.values(), strict=True
            ):
                parameter.grad = gradient * factor
            self.take(self.moments[name], index)

    def take(self, optimizer, index: int) -> None:
        optimizer.param_groups[0]["lr"] = self.rate(index)
        optimizer.step()


@pytest.mark.parametrize("budget", [nightly(100_000), 3 * 20])
def test_the_stack_equals_copies_of_head_and_tail_on_one_body(base, beginning, budget):
    """With unequal lengths, rows, micro-batches per step, and steps; in one pass or several."""
    steps = {"alpha": 6, "beta": 3, "gamma": 5}
    split = split_settings(schedule="client-batch", activation_budget=budget)
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split, train=SERVER) as server:
        server.begin_round(SIZES, 0)
        trained = train_together(clients, server, beginning, steps, SETTINGS)
        accounts = server.finish_lanes()
        body = server.end_round(SIZES)
    reference = Reference(base, beginning, split)
    for index in range(max(steps.values())):
        reference.step(index, {name: None for name in SIZES if steps[name] > index})
    for client in clients:
        assert client.losses == pytest.approx(reference.losses[client.name], abs=1e-5)
        assert_close(trained[client.name], reference.own[client.name])
    assert_close(body, {n: p.detach() for n, p in reference.body.items()})
    assert {a.client: a.steps for a in accounts} == steps
    assert not [account for account in accounts if account.error]


def test_rows_and_columns_that_do_not_fit_are_not_stacked():
    shapes = [(256, 1), (1, 256), (2, 128), (1, 128)]
    outputs = [
        HeadOutput(
            step=0,
            index=0,
            hidden=torch.full((rows, columns, 4), float(number)),
            padding=Padding("right", torch.full((rows,), columns)),
            columns_before=0,
            targets=1,
            step_targets=1,
            micro_batches=1,
        )
        for number, (rows, columns) in enumerate(shapes)
    ]
    passes = list(stack(0, dict(enumerate(outputs)), 512))
    sizes = [tuple(each.hidden()[0].shape[:2]) for each in passes]
    assert sizes == [(256, 1), (1, 256), (3, 128)]
    assert [each.budget_tokens for each in passes] == [256, 256, 384]


@pytest.mark.slow
def test_who_is_slow_changes_nothing(base, beginning):
    """Gradients are added in the order of micro-batches, even if some clients have fewer."""

    def be_slow(model) -> None:
        send = model.lane.send

        def sending(kind, *rest, **named):
            if kind is Kind.GRADIENT:
                time.sleep(0.2)
            send(kind, *rest, **named)

        model.lane.send = sending

    split = split_settings(schedule="client-batch", window=6)
    results = []
    for disturbing in ({}, {"gamma": be_slow}, {"alpha": be_slow}):
        clients = [Client(name, base, split) for name in SIZES]
        with serving(base, beginning, split, train=SERVER) as server:
            server.begin_round(SIZES, 0)
            steps = dict.fromkeys(SIZES, 3)
            trained = train_together(clients, server, beginning, steps, SETTINGS, disturbing)
            server.finish_lanes()
            own = {f"{c}/{n}": v for c, state in trained.items() for n, v in state.items()}
            results.append(own | server.end_round(SIZES))
    for other in results[1:]:
        assert not [n for n, v in results[0].items() if not torch.equal(v, other[n])]


@pytest.mark.parametrize("how", [nightly("close"), "cut"])
@pytest.mark.parametrize("moment", [nightly((0, 0)), (0, 2), nightly((2, 1)), (4, 3)], ids=str)
def test_a_client_that_goes_away_leaves_what_it_finished(base, beginning, moment, how):
    step, count = moment
    steps = dict.fromkeys(SIZES, 6)
    split = split_settings(schedule="client-batch", window=1, resume_timeout=0.5)
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split, train=SERVER) as server:
        server.begin_round(SIZES, 0)
        disturbing = {"beta": stop_after(step, count, how)}
        trained = train_together(clients, server, beginning, steps, SETTINGS, disturbing)
        accounts = {account.client: account for account in server.finish_lanes()}
        left = {name: SIZES[name] for name in ("alpha", "gamma")}
        body = server.end_round(left)
    reference = Reference(base, beginning, split)
    for index in range(6):
        going = {name: None for name in SIZES if name != "beta" or index < step}
        reference.step(index, going | ({"beta": count} if index == step else {}))
    assert set(trained) == set(left)
    for name in left:
        assert_close(trained[name], reference.own[name])
    assert_close(body, {n: p.detach() for n, p in reference.body.items()})
    assert (accounts["beta"].steps, bool(accounts["beta"].error)) == (step, True)
    assert not accounts["alpha"].error and not accounts["gamma"].error
    assert_nothing_is_left()


def test_those_who_join_too_late_are_named(base, beginning):
    split = split_settings(schedule="client-batch", join_timeout=2.0)
    clients = [Client(name, base, split) for name in ("alpha", "beta")]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        steps = dict.fromkeys(SIZES, 3)
        trained = train_together(clients, server, beginning, steps)
        assert set(trained) == {"alpha", "beta"}
        late = Client("gamma", base, split)
        with pytest.raises(Exception, match="gamma joined after the round had begun"):
            late.train(server, beginning, 3)
