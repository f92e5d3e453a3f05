"""Training through lanes yields the losses and final weights of training in one process."""

import pytest
import torch

from finetuning.adapters.adapter import export_adapter, load_adapter, trainable_parameters
from finetuning.aggregation.robust_aggregation import distance
from finetuning.evaluation.held_out import held_out_loss
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.optimization import make_optimizer
from split.model.adapters import join_adapters, take_apart
from split.model.partition import partition_of
from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from tests.marks import nightly
from tests.split.clients import (
    ADAPTER,
    SIZES,
    STEPS,
    TRAIN,
    Center,
    Client,
    StoppedError,
    assert_close,
    assert_nothing_is_left,
    draw,
    round_of,
    serving,
    split_settings,
    stop_after,
    train_together,
    weighted_mean,
    whole_model,
)
from tests.split.model.test_prefixes import PREFIX, random_prefix
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("adapter", "head", "tail", "schedule", "finished"),
    [
        nightly(ADAPTER, 1, 1, "serial", 0),
        (ADAPTER, 2, 1, "serial", 0),
        (ADAPTER, 0, 1, "serial", 0),
        # In its second round, at the learning rates of that.
        nightly(ADAPTER, 1, 1, "serial", 1),
        (ADAPTER, 1, 1, "client-batch", 1),
        (PREFIX, 2, 1, "serial", 0),
        nightly(PREFIX, 1, 1, "serial", 0),
        nightly(PREFIX, 0, 1, "serial", 0),
        (PREFIX, 1, 1, "client-batch", 0),
    ],
)
def test_one_client_equals_centralised_training(
    base, beginning, adapter, head, tail, schedule, finished
):
    train, apart = TRAIN, beginning
    split = split_settings(head_blocks=head, tail_blocks=tail, schedule=schedule)
    if adapter is PREFIX:
        train = TRAIN.model_copy(update={"max_gradient_norm": 0.2})
        beginning = random_prefix(base)
        parts = take_apart(beginning, partition_of(base, split))
        apart = parts["head"] | parts["tail"]
    with serving(base, beginning, split, adapter, train, rounds=finished + 1) as server:
        server.begin_round({"alpha": 9}, 0)
        client = Client("alpha", base, split, adapter)
        ends = client.train(server, apart, train=train, finished=finished)
        (account,) = server.finish_lanes()
        body = server.end_round({"alpha": 9})
    model = whole_model(base, beginning, adapter)
    examples, local_round = round_of("alpha", finished=finished)
    report, _ = train_round(
        model, trainable_parameters(model.peft_model), examples, 0, local_round, train
    )
    assert client.losses == pytest.approx(report.losses, abs=1e-5)
    final = export_adapter(model.peft_model)
    assert_close(join_adapters([ends, body]), final)
    moved = max(float((final[name] - value).abs().max()) for name, value in beginning.items())
    assert moved > train.learning_rate
    assert report.gradient_norm > train.max_gradient_norm  # clipping had something to do
    assert (account.steps, account.error) == (STEPS, "")


@pytest.mark.slow
def test_turns_equal_copies_of_head_and_tail_around_one_body(base, beginning):
    split = split_settings()
    trained, losses = {}, {}
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        for name in SIZES:
            client = Client(name, base, split)
            trained[name] = client.train(server, beginning)
            losses[name] = client.losses
            server.finish_lanes()  # before the next turn
        body = server.end_round(SIZES)
    center = Center(base, beginning, split)
    body_optimizer = make_optimizer(center.of("body"), TRAIN)
    for name in SIZES:
        expected, ends = center.turn(name, body_optimizer, beginning)
        assert losses[name] == pytest.approx(expected, abs=1e-5)
        assert_close(trained[name], ends)
    assert_close(body, {n: p.detach() for n, p in center.of("body").items()})


@pytest.mark.slow
def test_hierarchical_equals_separate_trainings_and_their_mean(base, beginning):
    split = split_settings(schedule="hierarchical")
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(dict.fromkeys(SIZES, 9), 0)  # with other weights than it ends
        trained = train_together(clients, server, beginning, dict.fromkeys(SIZES, STEPS))
        server.finish_lanes()
        whole = {n: join_adapters([trained[n], server.state_of(n)]) for n in SIZES}
        body = server.end_round(SIZES)
    expected = {}
    for client in clients:
        model = whole_model(base, beginning)
        examples, local_round = round_of(client.name)
        parameters = trainable_parameters(model.peft_model)
        report, _ = train_round(model, parameters, examples, 0, local_round, TRAIN)
        expected[client.name] = export_adapter(model.peft_model)
        assert client.losses == pytest.approx(report.losses, abs=1e-5)
        assert_close(whole[client.name], expected[client.name])
    mean = weighted_mean(expected)
    assert_close(body, {n: mean[n] for n in body})


def test_averaging_within_a_round_equals_lockstep_with_averages(base, beginning):
    every, steps = 3, {"alpha": 6, "beta": 5, "gamma": 3}
    split = split_settings(schedule="hierarchical", average_every=every)
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        trained = train_together(clients, server, beginning, steps)
        server.finish_lanes()
        whole = {n: join_adapters([trained[n], server.state_of(n)]) for n in SIZES}
    states, optimizers = dict.fromkeys(SIZES, beginning), {name: {} for name in SIZES}
    model = whole_model(base, beginning)
    for start in range(0, max(steps.values()), every):
        going = [name for name in SIZES if steps[name] > start]
        if start:
            mean = weighted_mean({name: states[name] for name in going})
            states |= dict.fromkeys(going, mean)
        for name in going:
            load_adapter(model.peft_model, states[name])
            examples, local_round = round_of(name)
            chosen = local_round.steps[start : min(start + every, steps[name])]
            part = LocalRound(chosen, start, STEPS, 0, local_round.deadline)
            _, optimizers[name] = train_round(
                model,
                trainable_parameters(model.peft_model),
                examples,
                0,
                part,
                TRAIN,
                optimizer_state=optimizers[name],
            )
            states[name] = export_adapter(model.peft_model)
    for name in SIZES:
        assert_close(whole[name], states[name])


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_the_window_changes_nothing_with_any_wire_type(base, beginning, wire):
    adapter = ADAPTER.model_copy(update={"dropout": 0.3})
    results = []
    for window in (1, 4):
        split = split_settings(window=window, wire_dtype=wire)
        with serving(base, beginning, split, adapter) as server:
            server.begin_round({"alpha": 9}, 0)
            client = Client("alpha", base, split, adapter)
            ends = client.train(server, beginning, 6)
            server.finish_lanes()
            results.append((client.losses, ends | server.end_round({"alpha": 9})))
    (losses, state), (others, other) = results
    assert losses == others
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize(
    ("party", "schedule"),
    [("head", "serial"), ("tail", "serial"), ("body", "serial"), ("body", "client-batch")],
)
def test_dropout_differs_by_step_and_micro_batch(base, beginning, party, schedule):
    """In one party at a time, which sees one text again and again and learns nothing of it."""
    changes = {"batch_size": 1, "accumulation": 6, "learning_rate": 1e-12}
    still, losses = TRAIN.model_copy(update=changes), []
    dropping = ADAPTER.model_copy(update={"dropout": 0.3})
    split = split_settings(schedule=schedule)
    client = Client("alpha", base, split)
    client.examples = draw(1, seed=0) * 24
    if party != "body":
        client.ends[party].remove("default")
        client.ends[party].attach(dropping)

    def note(model) -> None:
        accumulate = model.accumulate

        def accumulating(batches, seed):
            found = accumulate(batches, seed)
            losses.extend(found)
            return found

        model.accumulate = accumulating

    adapter = dropping if party == "body" else ADAPTER
    with serving(base, beginning, split, adapter, still) as server:
        server.begin_round({"alpha": 9}, 0)
        client.train(server, beginning, 2, still, note)
    assert len(losses) == len(set(losses)) == 2 * 6


@pytest.mark.parametrize("adapter", [ADAPTER, PREFIX], ids=["lora", "prefix"])
def test_a_split_model_measures_the_loss_of_the_whole(base, beginning, adapter):
    split = split_settings()
    examples = draw(17, 1)
    state = random_prefix(base) if adapter is PREFIX else beginning
    parts = take_apart(state, partition_of(base, split))
    ends = parts["head"] | parts["tail"]
    with serving(base, state, split, adapter) as server:
        client = Client("alpha", base, split, adapter)
        models = {"base": None, "global": parts["body"]}
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            model.choose("global", ends)
            adapted = held_out_loss(model, examples, 0, 3)
            model.choose("base", None)
            bare = held_out_loss(model, examples, 0, 3)
            model.end()
    whole = whole_model(base, state, adapter)
    expected = held_out_loss(whole, examples, 0, 3)
    if adapter is PREFIX:  # PEFT adds up in another order
        assert adapted.loss == pytest.approx(expected.loss, abs=1e-6)
    else:
        assert adapted == expected
    with whole.without_adapter():
        assert bare == held_out_loss(whole, examples, 0, 3)
    assert abs(adapted.loss - bare.loss) > 1e-5


def test_optimizers_go_on_or_start_anew(base, beginning):
    train = TRAIN.model_copy(update={"optimizer_state": "keep"})
    split = split_settings()
    with serving(base, beginning, split, train=train) as server:
        server.begin_round({"alpha": 9}, 0)
        Client("alpha", base, split).train(server, beginning, 4, train)
        server.finish_lanes()
        before = server.export_optimizers()
        assert before and all(name.startswith("body/") for name in before)
        server.begin_round({"alpha": 9}, 0)
        assert all(torch.equal(v, server.export_optimizers()[n]) for n, v in before.items())
    with serving(base, beginning, split, train=train) as server:
        server.load_optimizers(before)
        after = server.export_optimizers()
        assert after.keys() == before.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    with serving(base, beginning, split) as server:
        server.load_optimizers(before)
        server.begin_round({"alpha": 9}, 0)
        Client("alpha", base, split).train(server, beginning, 4)
        server.finish_lanes()
        again = server.end_round({"alpha": 9})
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        Client("alpha", base, split).train(server, beginning, 4)
        server.finish_lanes()
        assert all(torch.equal(v, again[n]) for n, v in server.end_round({"alpha": 9}).items())


@pytest.mark.parametrize("schedule", ["serial", nightly("hierarchical")])
def test_a_client_that_leaves_changes_no_result_of_others(base, beginning, schedule):
    """Beta leaves in the middle of its third step."""
    split = split_settings(schedule=schedule)
    train = TRAIN.model_copy(update={"optimizer_state": "keep"})
    results = []
    for names in (["alpha", "beta", "gamma"], ["alpha", "gamma"]):
        clients = [Client(name, base, split) for name in names]
        with serving(base, beginning, split, train=train) as server:
            server.begin_round({name: SIZES[name] for name in names}, 0)
            trained, accounts = {}, []
            for client in clients:
                disturbing = {"beta": stop_after(2, 1, "close")}
                steps = {client.name: 5}
                trained |= train_together([client], server, beginning, steps, {}, disturbing)
                accounts += server.finish_lanes()  # before the next turn
            body = server.end_round({name: SIZES[name] for name in ("alpha", "gamma")})
            optimizers = server.export_optimizers()
        own = {f"{c}/{n}": v for c, state in trained.items() for n, v in state.items()}
        results.append(body | own | optimizers)
        assert [a.client for a in accounts if a.error] == [n for n in names if n == "beta"]
    one, other = results
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_nothing_is_left()


@pytest.mark.parametrize("schedule", ["serial", "client-batch", "hierarchical"])
def test_a_round_that_everybody_breaks_off_leaves_no_gradients(base, beginning, schedule):
    """Neither at the server nor at a client, whose parts stay in memory."""
    split, results = split_settings(schedule=schedule), []
    client = Client("alpha", base, split)
    for broken in (1, 0):
        with serving(base, beginning, split) as server:
            for _ in range(broken):
                server.begin_round({"alpha": 9}, 0)
                disturbing = {"alpha": stop_after(0, 1, "close")}
                assert not train_together([client], server, beginning, {"alpha": 3}, {}, disturbing)
                server.finish_lanes()
            server.begin_round({"alpha": 9}, 0)
            ends = client.train(server, beginning, 3)
            server.finish_lanes()
            results.append(ends | server.end_round({"alpha": 9}))
    one, other = results
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_client_that_leaves_keeps_its_earlier_optimizer(base, beginning):
    split = split_settings(schedule="hierarchical")
    train = TRAIN.model_copy(update={"optimizer_state": "keep"})
    clients = [Client(name, base, split) for name in ("alpha", "beta")]
    optimizers = []
    with serving(base, beginning, split, train=train) as server:
        for disturbing in ({}, {"beta": stop_after(2, 1, "close")}):
            server.begin_round({client.name: SIZES[client.name] for client in clients}, 0)
            train_together(clients, server, beginning, {"alpha": 3, "beta": 3}, {}, disturbing)
            server.finish_lanes()
            server.end_round({"alpha": 9} if disturbing else {"alpha": 9, "beta": 6})
            optimizers.append(server.export_optimizers())
    first, second = optimizers
    assert first.keys() == second.keys() and any(name.startswith("beta/") for name in first)
    assert {name.partition("/")[0] for name in first if torch.equal(first[name], second[name])} == {
        "beta"
    }


def test_who_breaks_off_after_handing_in_is_not_in_the_average(base, beginning):
    """Beta leaves while it waits for alpha."""
    split = split_settings(schedule="hierarchical", average_every=2)
    results = []

    def leave(model) -> None:
        send = model.lane.send

        def sending(kind, *rest, **named):
            send(kind, *rest, **named)
            if kind is Kind.AVERAGE:
                wait_until(lambda: server.schedule.gathered)
                raise StoppedError

        model.lane.send = sending

    def be_late(model) -> None:
        send = model.lane.send

        def sending(kind, *rest, **named):
            if kind is Kind.AVERAGE:
                wait_until(lambda: len(server.progress()) <= 1)
            send(kind, *rest, **named)

        model.lane.send = sending

    for names in (["alpha", "beta"], ["alpha"]):
        clients = [Client(name, base, split) for name in names]
        with serving(base, beginning, split) as server:
            server.begin_round({name: SIZES[name] for name in names}, 0)
            disturbing = {"alpha": be_late, "beta": leave}
            steps = dict.fromkeys(names, 4)
            trained = train_together(clients, server, beginning, steps, {}, disturbing)
            results.append(trained["alpha"] | server.state_of("alpha"))
    one, other = results
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_who_hands_in_last_changes_no_average(base, beginning):
    """Not by a bit: adapters are added in the order of names."""
    split = split_settings(schedule="hierarchical", average_every=1)
    clients, results = [Client(name, base, split) for name in SIZES], []

    def be_last(model) -> None:
        send = model.lane.send

        def sending(kind, step=0, *rest, **named):
            if kind is Kind.AVERAGE:
                wait_until(lambda: len(server.schedule.gathered.get(step, {})) == 2)
            send(kind, step, *rest, **named)

        model.lane.send = sending

    for last in ("alpha", "gamma"):
        with serving(base, beginning, split) as server:
            server.begin_round(SIZES, 0)
            steps = dict.fromkeys(SIZES, 3)
            trained = train_together(clients, server, beginning, steps, {}, {last: be_last})
            own = {f"{c}/{n}": v for c, state in trained.items() for n, v in state.items()}
            results.append(own | server.end_round(SIZES))
    one, other = results
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_too_few_who_average_are_told_what_to_do(base, beginning):
    """As with one actor that serves three clients in turn; the last doesn't wait for the others."""
    split = split_settings(schedule="hierarchical", average_every=2, join_timeout=0.3)
    with serving(base, beginning, split, minimum=2) as server:
        server.begin_round(SIZES, 0)
        for name in SIZES:
            with pytest.raises(LaneError, match="client-resources-num-cpus"):
                Client(name, base, split).train(server, beginning, 5)
        assert len(server.finish_lanes()) == 3


@pytest.mark.parametrize(
    ("weight", "caps", "most"),
    [nightly(0.0, None, 1.0), nightly(1e3, None, 1.0), (1e3, {"gamma": 1.0}, 0.2)],
)
def test_adapters_handed_in_move_the_others_little(base, beginning, weight, caps, most):
    """Gamma hands in its own adapters, or a number; all begin elsewhere than the server did."""
    every, steps = 2, dict.fromkeys(SIZES, 4)
    start = {name: value + 0.1 for name, value in beginning.items()}
    split = split_settings(schedule="hierarchical", average_every=every)
    received = {}

    def disturb(model) -> None:
        average = model.body.average

        def averaging(own):
            given = {n: torch.full_like(v, weight) for n, v in own.items()} if weight else own
            received.update(average(given))
            return received

        model.body.average = averaging

    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0, start, caps)
        train_together(clients, server, start, steps, disturbing={"gamma": disturb})
        server.finish_lanes()
        scaled = server.scaled
    far = distance(received, start)
    assert (scaled.keys() == {"gamma"}) == (weight > 0)
    # Two honest ones of 9 and 6 rows and what gamma may add, with 3 of 18.
    assert 0 < far < most
