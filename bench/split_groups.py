"""A group of clients in one process or several, and their server, for measuring schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

from bench.gpu_state import peak_gpu_memory, wait_for_gpus
from bench.split_job import LIFETIME, SEED, Job, load_body, load_ends, serving
from bench.split_processes import train_ends
from finetuning.settings import SplitSettings
from split.model.cut import PartyName
from split.model.part import Part


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


def train_group(link: Connection, group: Group) -> None:
    """Train a group of clients, or some of it; the first message has their invitations.

    Each client is a thread with parts of its own. A message ``step`` lets all of them take one, and
    the answer is the mean of their losses; the first answer says that all have joined. Any other
    message asks for the peak of GPU memory, in bytes.
    """
    links = [_start(job, group.split) for job in group.jobs]
    for each, invitation in zip(links, link.recv(), strict=True):
        each.send(invitation)
    _mean_loss(links)
    link.send(None)
    while True:
        if link.recv() != "step":
            link.send(peak_gpu_memory())
            continue
        for each in links:
            each.send(None)
        link.send(_mean_loss(links))


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


def serve_group(link: Connection, group: Group) -> None:
    """Serve a group of clients.

    The first message has their invitations. From then on ``settle`` is answered when all work is
    done, and any other message with the peak of GPU memory, in bytes.
    """
    job = group.jobs[0]
    with serving(load_body(job, group.split), job, group.split, group.names) as server:
        link.send([server.invite_to_train(name, 1, SEED, LIFETIME) for name in group.names])
        while True:
            if link.recv() != "settle":
                link.send(peak_gpu_memory())
                continue
            # Goes through the queue, so that the optimizers' work is done when it answers.
            server.state_of(group.names[0])
            wait_for_gpus()
            link.send(None)
