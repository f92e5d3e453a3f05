"""The server and the three honest clients of ``bench.hostile``, each a process."""

import ctypes
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from threading import Thread

from bench.split_job import LIFETIME, SEED, Job, load_body, load_ends, serving
from client_app.split import open_lane
from finetuning.settings import SplitSettings
from finetuning.training.loop import train_round
from split.client.split_model import ClientRound, SplitModel
from split.model.adapters import load_state
from split.model.cut import PartyName
from split.model.part import Part
from split.protocol.frames import Limits
from split.protocol.invitation import Invitation

HONEST = ["alpha", "beta", "gamma"]
_HOSTILE = "mallory"


def serve_rounds(link: Connection, job: Job) -> None:
    """Serve runs of two rounds; a run begins with its settings."""
    while True:
        split = link.recv()
        with serving(load_body(job, split), job, split, HONEST) as server:
            for number in (1, 2):
                members = link.recv()
                names = HONEST + [_HOSTILE] * bool(members)
                server.begin_round(dict.fromkeys(names, 1), SEED)
                train = [server.invite_to_train(name, number, SEED, LIFETIME) for name in names]
                evaluate = [
                    server.invite_to_evaluate(f"{_HOSTILE}-{i % 8}", number, {"base": None}, 600.0)
                    for i in range(members)
                ]
                link.send((train, evaluate))
                link.recv()
                accounts = server.finish_lanes()
                errors = {a.client: a.error for a in accounts if a.client in HONEST and a.error}
                link.send((server.end_round(dict.fromkeys(HONEST, 1.0)), errors))
                while link.recv() == "trim":
                    gc.collect()
                    ctypes.CDLL(None).malloc_trim(0)
                    link.send(None)


def train_honest(link: Connection, jobs: Sequence[Job], split: SplitSettings) -> None:
    """Train rounds of three clients; a message has whether it is a run's first, and invitations."""
    ends = [load_ends(job, split) for job in jobs]
    begin = jobs[0].state()
    while True:
        first, together, invitations = link.recv()
        models = [each["head"].trainable() | each["tail"].trainable() for each in ends]
        if first:
            for parameters in models:
                load_state(parameters, {name: begin[name] for name in parameters})
        started = time.perf_counter()
        errors: list[Exception] = []

        def work(number: int, invitation: Invitation, errors: list[Exception] = errors) -> None:
            try:
                _train(ends[number], jobs[number], invitation)
            except Exception as error:
                errors.append(error)

        threads = [Thread(target=work, args=each) for each in enumerate(invitations)]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        weights = [{n: p.detach().clone() for n, p in model.items()} for model in models]
        link.send((time.perf_counter() - started, weights))


def _train(ends: Mapping[PartyName, Part], job: Job, invitation: Invitation) -> None:
    shape, deadline = job.shape, time.monotonic() + LIFETIME
    with closing(
        open_lane(invitation, Limits(shape.hidden, "float32", shape.tokens), deadline)
    ) as lane:
        model = SplitModel(ends["head"], ends["tail"], lane, 300.0)
        model.join(ClientRound(job.steps, 0, job.steps, shape.tokens, 0, deadline))
        train_round(model, model.parameters, job.examples(job), 0, job.place(), job.train)
        model.end()
