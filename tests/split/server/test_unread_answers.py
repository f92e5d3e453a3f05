"""Clients that acknowledge no frames, and the memory that the server uses for them."""

import gc
import threading
from contextlib import closing

import torch

from finetuning.data.batching import collate
from split.protocol.frames import Kind, Limits
from split.server.block_server import BlockServer
from tests.split.clients import LONGEST, STEPS, Client, draw, serving, split_settings
from tests.split.hostile import Member, end_of_step, gradient, hidden, join
from tests.waiting import wait_until

WIDTH = 32
ROWS, COLUMNS = 4, 19
ANSWER_BYTES = ROWS * COLUMNS * WIDTH * 4


def bytes_in_memory() -> int:
    """Count the bytes of all hidden states and gradients in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors if t.dim() == 3 and t.shape[2] == WIDTH]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def take_steps(member: Member, steps: int) -> None:
    """Train on one row of one token, and acknowledge nothing."""
    counts = {"targets": 1, "step_targets": 1, "micro_batches": 1}
    for step in range(steps):
        member.send(hidden(member.sealer, WIDTH, columns=1, step=step, **counts))
        assert member.wait_for(Kind.HIDDEN, Kind.ERROR) is Kind.HIDDEN
        member.send(gradient(member.sealer, WIDTH, columns=1, step=step))
        member.send(end_of_step(member.sealer, step))
        assert member.wait_for(Kind.STEP, Kind.ERROR) is Kind.STEP


def train_beside(member: Member, honest: Client, server: BlockServer, state, steps: int) -> None:
    fields = {"steps": steps, "first_step": 0, "total_steps": steps, "longest": 1}
    training = threading.Thread(target=honest.train, args=(server, state, steps))
    training.start()
    member.send(join(member.sealer, fields | {"wants_gradient": True}))
    assert member.wait_for(Kind.WELCOME, Kind.ERROR) is Kind.WELCOME
    take_steps(member, steps)
    training.join()


def test_an_unread_answer_keeps_no_rows_of_other_clients(base, beginning):
    """The rows of a stack are one tensor; of that, a client keeps what it was sent."""
    steps = STEPS
    split = split_settings(schedule="client-batch")
    honest = Client("alpha", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 6, "mallory": 6}, 0)
        with closing(Member(server.invite_to_train("mallory", 1, 0, 60.0))) as member:
            before = bytes_in_memory()
            train_beside(member, honest, server, beginning, steps)
            assert len(honest.losses) == steps
            own = 2 * steps * WIDTH * 4  # two answers of a token in each step
            assert before + own <= bytes_in_memory() <= before + 2 * own


def assert_released(before: int) -> None:
    """Wait until no more bytes are in memory than before, except for a few tensors in use."""

    def more() -> int:
        return bytes_in_memory() - before

    wait_until(lambda: more() <= 4 * ANSWER_BYTES, seen=more)


def max_cached_tokens(tokens: int, window: int) -> int:
    """Return the maximum number of bytes that a server stores for a client.

    Args:
        tokens: Maximum number of tokens in a micro-batch.
        window: Maximum number of micro-batches in flight.

    """
    return Limits(WIDTH, "float32", tokens, window=window).queue_bytes


def leave_unread(member: Member, count: int, **fields) -> int:
    """Request answers, acknowledge none, and return how many arrived before the lane ended."""
    for number in range(count):
        member.send(hidden(member.sealer, WIDTH, ROWS, COLUMNS, **fields))
        if member.wait_for(Kind.HIDDEN, Kind.ERROR) is not Kind.HIDDEN:
            return number
    return count


def leave_all_unread(member: Member, most: int, between, **fields) -> None:
    """Leave answers unread until the lane ends; call ``between`` when half of them are stored."""
    member.send(join(member.sealer, {"model": "base"}))
    assert member.wait_for(Kind.WELCOME, Kind.ERROR) is Kind.WELCOME
    before, half = bytes_in_memory(), most // ANSWER_BYTES // 2
    assert leave_unread(member, half, **fields) == half
    kept = bytes_in_memory() - before
    assert half * ANSWER_BYTES <= kept <= (half + 4) * ANSWER_BYTES  # what is counted is kept
    between()
    further = leave_unread(member, 2 * half, **fields)
    assert (half + further) * ANSWER_BYTES <= most
    assert further < 2 * half and member.is_ended()


def test_an_evaluation_whose_answers_are_not_read_ends_alone(base, beginning):
    split = split_settings()
    honest, batches = Client("alpha", base, split), [collate(draw(3, 1), 0)]
    with serving(base, beginning, split) as server:

        def invite(name):
            return server.invite_to_evaluate(name, 0, {"base": None}, 60.0)

        with closing(Member(invite("mallory"))) as member, honest.lane(invite("alpha")) as model:
            model.choose("base", None)
            expected, found = model.summed_losses(batches), []
            before = bytes_in_memory()
            most = max_cached_tokens(LONGEST, split.window)
            leave_all_unread(member, most, lambda: found.append(model.summed_losses(batches)))
            assert [*found, model.summed_losses(batches)] == [expected] * 2
            model.end()
            assert_released(before)
        errors = {account.client: account.error for account in server.finish_lanes()}
    assert not errors["alpha"] and "mallory has not acknowledged" in errors["mallory"]
