"""Groups of clients with a server each, in two processes, for measurements of the schedules."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

from bench.gpu_state import peak_gpu_memory, wait_for_gpus
from bench.split_job import LIFETIME, SEED, Job, load_body, load_ends, serving
from bench.split_processes import train_ends
from finetuning.settings import SplitSettings
from split.block_server import BlockServer
from split.partition import PartyName
from split.parts import Part


@dataclass(frozen=True)
class Group:
    """Clients who train in one round of a server of their own.

    Attributes:
        jobs: of each client.
        split: the server's and the clients' settings.

    """

    jobs: Sequence[Job]
    split: SplitSettings

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [f"client-{number}" for number in range(len(self.jobs))]


def train_groups(link: Connection, groups: Sequence[Group]) -> None:
    """Train groups of clients; the first message has their invitations, each other one a group.

    Each client is a thread with parts of its own. A message lets all clients of a group take a
    step, and the answer is the mean of their losses; the first answer says that all have joined.
    None asks for the peak of GPU memory.
    """
    links = [[_start(job, group.split) for job in group.jobs] for group in groups]
    for own, invitations in zip(links, link.recv(), strict=True):
        for each, invitation in zip(own, invitations, strict=True):
            each.send(invitation)
    for own in links:
        _mean_loss(own)
    link.send(None)
    while True:
        number = link.recv()
        if number is None:
            link.send(peak_gpu_memory())
            continue
        for each in links[number]:
            each.send(None)
        link.send(_mean_loss(links[number]))


def _start(job: Job, split: SplitSettings) -> Connection:
    """Start a client's thread, and give the end of a pipe to it."""
    mine, other = Pipe()
    arguments = (other, load_ends(job, split), job, split)
    Thread(target=_in_thread, args=arguments, daemon=True).start()
    return mine


def _mean_loss(links: Sequence[Connection]) -> float:
    losses = [each.recv() for each in links]
    for loss in losses:
        if isinstance(loss, Exception):
            raise loss
    return float(sum(losses) / len(losses))


def _in_thread(
    link: Connection, ends: Mapping[PartyName, Part], job: Job, split: SplitSettings
) -> None:
    try:
        train_ends(link, ends, job, split)
    except (EOFError, BrokenPipeError):
        pass  # nobody wants anything any more
    except Exception as error:
        link.send(error)


def _serving_group(group: Group) -> AbstractContextManager[BlockServer]:
    job = group.jobs[0]
    return serving(load_body(job, group.split), job, group.split, group.names)


def serve_groups(link: Connection, groups: Sequence[Group]) -> None:
    """Serve groups of clients, each by a server of its own.

    The first message has the invitations of each. From then on each one names a group, and is
    answered when all work of its server is done, or is None, for the peak of GPU memory.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(_serving_group(group)) for group in groups]
        link.send(
            [
                [server.invite_to_train(name, 1, SEED, LIFETIME) for name in group.names]
                for server, group in zip(servers, groups, strict=True)
            ]
        )
        while True:
            number = link.recv()
            if number is None:
                link.send(peak_gpu_memory())
                continue
            # Goes through the queue, so that the optimizers' work is done when it answers.
            servers[number].state_of(groups[number].names[0])
            wait_for_gpus()
            link.send(None)
