"""Clients that acknowledge nothing of what they are sent, and what the server keeps for them."""

import gc
import threading
from contextlib import closing

import torch

from split.protocol.frames import Kind
from split.server.block_server import BlockServer
from tests.split.clients import Client, serving, split_settings
from tests.split.hostile import Member, end_of_step, gradient, hidden, join

WIDTH = 32


def bytes_in_memory() -> int:
    """Count the bytes of all hidden states and gradients that the process keeps."""
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


def test_an_unread_answer_keeps_no_other_client_s_rows(base, beginning):
    """The rows of a stack are one tensor; of that, a client keeps what it was sent."""
    steps = 12
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
