"""Clients in a stack that send frames which our programs never send."""

from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from split.protocol.frames import Kind
from split.server.compute import Priority
from tests.split import hostile
from tests.split.clients import TRAIN, Client, serving, split_settings
from tests.split.server.test_session import busy, cleans_up
from tests.waiting import wait_until

WIDTH = 32
COUNTS = {"targets": 1, "step_targets": 1, "micro_batches": 1}


@contextmanager
def joined(base, beginning, names, steps=1, longest=4, leaving=(), **changes):
    """Yield a server with ``client-batch``, and the members that have joined.

    Those who are ``leaving`` train only one step.
    """
    split = split_settings(schedule="client-batch", **changes)
    fields = {"first_step": 0, "total_steps": steps, "longest": longest, "wants_gradient": True}
    train = TRAIN.model_copy(update={"max_gradient_norm": 0.0})
    with serving(base, beginning, split, train=train) as server, ExitStack() as peers:
        server.begin_round(dict.fromkeys(names, 6), 0)
        members = {}
        for name in names:
            invitation = server.invite_to_train(name, 1, 0, 60.0)
            member = members[name] = peers.enter_context(closing(hostile.Member(invitation)))
            own = fields | {"steps": 1 if name in leaving else steps}
            member.send(hostile.join(member.sealer, own))
        for member in members.values():
            awaited(member, Kind.WELCOME)
        yield server, members


def awaited(member, kind):
    assert member.wait_for(kind, Kind.ERROR) is kind


def send_gradient(member, **named):
    """Wait for a micro-batch's output, and send its gradient."""
    awaited(member, Kind.HIDDEN)
    member.send(hostile.gradient(member.sealer, WIDTH, **named))


def compute(members, step):
    """Let members have a micro-batch computed."""
    for member in members.values():
        member.send(hostile.hidden(member.sealer, WIDTH, step=step, **COUNTS))
    for member in members.values():
        send_gradient(member, step=step)
    for member in members.values():
        awaited(member, Kind.GRADIENT)


def end(members, norms, step):
    """Let members end a step, and report their norms."""
    for name, norm in norms.items():
        sealer = members[name].sealer
        members[name].send(hostile.end_of_step(sealer, step, squared_norm=norm**2))


def test_a_step_that_begins_too_early_stops_nobody(base, beginning):
    """The others used to wait for the hasty one until their own time was over."""
    with joined(base, beginning, ("alpha", "mallory"), steps=2) as (server, members):
        alpha, mallory = members.values()
        for member in members.values():
            member.send(hostile.hidden(member.sealer, WIDTH, **COUNTS))
        for member in members.values():
            send_gradient(member)
        for member in members.values():
            awaited(member, Kind.GRADIENT)
        mallory.send(hostile.end_of_step(mallory.sealer))
        mallory.send(hostile.hidden(mallory.sealer, WIDTH, step=1, **COUNTS))
        assert mallory.wait_for(Kind.STEP, Kind.ERROR) is Kind.ERROR
        alpha.send(hostile.end_of_step(alpha.sealer))
        awaited(alpha, Kind.STEP)
        alpha.send(hostile.hidden(alpha.sealer, WIDTH, step=1, **COUNTS))
        awaited(alpha, Kind.HIDDEN)
        accounts = {account.client: account.error for account in server.finish_lanes()}
    assert "before the last step was answered" in accounts["mallory"]


def test_the_norm_of_a_member_that_has_left_raises_no_cap(base, beginning):
    """It is in the step's norm, but not in the others' median of later steps."""
    with joined(base, beginning, ("ada", "alpha", "mallory"), steps=2) as (server, members):
        compute(members, 0)
        with busy(server):
            end(members, {"ada": 1.0, "alpha": 1.0, "mallory": 2.0**20}, 0)
            wait_until(lambda: [j.priority for j in server.compute.waiting] == [Priority.STEP])
            # Its next step begins too early, which ends its lane.
            mallory = members.pop("mallory")
            mallory.send(hostile.hidden(mallory.sealer, WIDTH, step=1, **COUNTS))
            wait_until(lambda: cleans_up(server))
        for member in members.values():
            awaited(member, Kind.STEP)
        compute(members, 1)
        end(members, {"ada": 1.0, "alpha": 5.0}, 1)
        for member in members.values():
            awaited(member, Kind.STEP)
        capped = {account.client: account.capped for account in server.finish_lanes()}
    assert (capped["ada"], capped["alpha"]) == (0, 1)


def test_a_member_that_has_finished_stays_in_the_others_median(base, beginning):
    """Without ada, the norm of alpha would be compared with mallory's alone."""
    names = ("ada", "alpha", "mallory")
    with joined(base, beginning, names, steps=2, leaving=("ada",)) as (server, members):
        compute(members, 0)
        end(members, {"ada": 10.0, "alpha": 5.0, "mallory": 1.0}, 0)
        for member in members.values():
            awaited(member, Kind.STEP)
        ada = members.pop("ada")
        ada.send(hostile.empty(ada.sealer, Kind.END))
        awaited(ada, Kind.END)
        ada.send(hostile.empty(ada.sealer, Kind.CLOSE))
        wait_until(lambda: len(server.progress()) == 2)
        compute(members, 1)
        end(members, {"alpha": 5.0, "mallory": 1.0}, 1)
        for member in members.values():
            awaited(member, Kind.STEP)
        accounts = server.finish_lanes()
    assert [(account.client, account.capped) for account in accounts] == [(n, 0) for n in names]


def step_of(base, beginning, sent, **changes):
    """Take a step in which each client sends one micro-batch of one row.

    Args:
        base: The base model.
        beginning: The adapter.
        sent: Columns, targets and the value of all elements of the gradient, keyed by client.
        changes: Settings.

    Returns:
        The norm of the body's gradient, and the clients' accounts.

    """
    norms = []

    def note(optimizer, *_) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(sum(float(g.square().sum()) for g in gradients) ** 0.5)

    longest = max(columns for columns, _, _ in sent.values())
    with joined(base, beginning, tuple(sent), longest=longest, **changes) as (server, members):
        for name, (columns, targets, _) in sent.items():
            counts = {"targets": targets, "step_targets": targets, "micro_batches": 1}
            sealer = members[name].sealer
            members[name].send(hostile.hidden(sealer, WIDTH, columns=columns, number=1.0, **counts))
        for name, (columns, _, number) in sent.items():
            send_gradient(members[name], columns=columns, number=number)
        hook = register_optimizer_step_pre_hook(note)
        for member in members.values():
            awaited(member, Kind.GRADIENT)
            member.send(hostile.end_of_step(member.sealer))
        for member in members.values():
            awaited(member, Kind.STEP)
        accounts = {account.client: account for account in server.finish_lanes()}
    hook.remove()  # the server has stopped, after its step
    return norms[0], accounts


@pytest.mark.parametrize(("columns", "budget"), [(8, 8), (4, 4)])
def test_a_gradient_of_the_first_pass_is_capped_too(base, beginning, columns, budget):
    """Of a pass that has nobody else, before one of the two others, or one of each of them."""
    others = dict.fromkeys(("alpha", "beta"), (4, 1, 1.0))
    norms = []
    for number in (1.0, 2.0**30):
        sent = {"ada": (columns, 1, number)} | others
        norms.append(step_of(base, beginning, sent, activation_budget=budget)[0])
    assert 0 < norms[1] < 20 * norms[0]


@pytest.mark.parametrize("liar", ["ada", "mallory"])
@pytest.mark.parametrize(
    ("claimed", "number", "least", "most"),
    [
        (80, 2.0**30, 0.8, 1.3),
        (80, 1e-3, 0.35, 0.5),
        (8, 2.0**30, 1.0, 2.0),
        (1, 2.0**30, 1.0, 1.4),
    ],
)
def test_targets_that_a_client_does_not_have_buy_no_share(
    base, beginning, caplog, liar, claimed, number, least, most
):
    """With three times what is usual, two others that have 8 keep two of at most five parts.

    The liar sends ten times as many tokens as they do, in a pass before or after theirs, and claims
    more targets or fewer.
    """
    norms = []
    for own in ((8, 8, 1.0), (80, claimed, number)):
        sent = dict(sorted({liar: own, "alpha": (8, 8, 1.0), "beta": (8, 8, 1.0)}.items()))
        norm, accounts = step_of(base, beginning, sent, activation_budget=80)
        norms.append(norm)
    assert least < norms[1] / norms[0] < most
    assert [name for name, account in accounts.items() if account.capped] == [liar]
    named = [record.args[0] for record in caplog.records if "split.share-cap" in record.msg]
    assert named == [liar]


def step_with(base, beginning, clients, factors):
    """Return the gradients and STEP frames that clients receive if they scale their gradients."""
    hidden, gradient = torch.randn(2, 1, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    plan = {"steps": 1, "first_step": 0, "total_steps": 1, "longest": 4, "wants_gradient": True}
    states = {"hidden": hidden, "lengths": torch.tensor([4])}
    with serving(base, beginning, clients[0].split) as server, ExitStack() as stack:
        server.begin_round(dict.fromkeys(factors, 6), 0)
        invitations = [server.invite_to_train(client.name, 1, 0, 60.0) for client in clients]
        lanes = [
            stack.enter_context(client.lane(invitation)).lane
            for client, invitation in zip(clients, invitations, strict=True)
        ]

        def answers(kind, content):
            for client, lane in zip(clients, lanes, strict=True):
                lane.send(kind, 0, 0, *content(factors[client.name]))
            return {
                client.name: lane.receive(30.0) for client, lane in zip(clients, lanes, strict=True)
            }

        answers(Kind.JOIN, lambda _: ({}, plan))
        answers(Kind.HIDDEN, lambda _: (states, COUNTS | {"side": "right"}))
        came = answers(Kind.GRADIENT, lambda factor: ({"gradient": gradient * factor}, {}))
        ends = answers(Kind.STEP, lambda factor: ({}, {"squared_norm": factor**2}))
    return {name: frame.tensors["gradient"] for name, frame in came.items()}, ends


def test_an_exaggeration_changes_only_the_own_head_and_tail(base, beginning):
    """Its own head gets its gradient as it is, and the norm that it reports scales that down."""
    split = split_settings(schedule="client-batch")
    clients = [Client(name, base, split) for name in ("ada", "alpha", "mallory")]
    usual = {client.name: 1.0 for client in clients}
    honest, _ = step_with(base, beginning, clients, usual)
    most = 2.0**20
    came, ends = step_with(base, beginning, clients, usual | {"mallory": most})
    came["mallory"] /= most
    for name, gradient in came.items():
        torch.testing.assert_close(gradient, honest[name], rtol=1e-4, atol=1e-5)
    norms = {name: end.fields["norm"] for name, end in ends.items()}
    clipped = {name: end.fields["factor"] for name, end in ends.items()}
    assert norms["mallory"] == pytest.approx(most, rel=0.01)
    assert clipped["mallory"] == pytest.approx(TRAIN.max_gradient_norm / most, rel=0.01)
    assert norms["ada"] == norms["alpha"] < most / 100
    assert clipped["ada"] == clipped["alpha"] > 100 * clipped["mallory"]
