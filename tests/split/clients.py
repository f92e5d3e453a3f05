"""Clients, servers and single-process references for the tests of training through lanes."""

import copy
import functools
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from finetuning.adapters.adapter import (
    State,
    attach_adapter,
    exported_names,
    load_adapter,
    load_state,
    trainable_parameters,
)
from finetuning.data.batching import collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.model.base_model import load_base_model
from finetuning.randomness import derive_seed
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.optimization import learning_rate, make_optimizer
from finetuning.whole_model import WholeModel
from split.client.split_model import SplitModel
from split.lane.dialling import open_lane
from split.model.adapters import join_adapters, take_apart
from split.model.key_values import KeyValues
from split.model.loading import load_parts
from split.model.part import Activations, Part
from split.model.partition import Partition, PartyName, partition_of
from split.protocol.errors import LaneCutError
from split.protocol.frames import Kind, Limits
from split.protocol.training import RoundPlan
from split.server.block_server import BlockServer
from split.server.body import load_body
from split.server.schedules.stacked_micro_batch import StackedMicroBatch
from split.settings import SplitSettings
from tests.waiting import wait_until

STEPS = 8
LONGEST = 4 * 20
MAX_CACHED_TOKENS = 3 * (11 + 12)
MODEL = ModelSettings(dtype="float32")
ADAPTER = AdapterSettings(rank=2, alpha=4, dropout=0.0, targets="q_proj,v_proj,down_proj")
TRAIN = TrainSettings(
    batch_size=2, accumulation=3, learning_rate=5e-3, max_gradient_norm=0.5, schedule="cosine"
)
SIZES = {"alpha": 9, "beta": 6, "gamma": 3}


def draw(count: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for row in range(count):
        length = int(torch.randint(4, 21, (), generator=generator))
        prompt = int(torch.randint(1, length - 1, (), generator=generator))
        tokens = torch.randint(2, 64, (length,), generator=generator)
        examples.append(Example(tokens, torch.arange(length) >= prompt, prompt, "", row))
    return examples


def round_of(name: str, steps: int = STEPS, finished: int = 0) -> tuple[list[Example], LocalRound]:
    """Return a client's examples, and a round with the examples' indices for each step."""
    examples = draw(24, derive_seed("examples", name) % 2**31)
    order = torch.Generator().manual_seed(derive_seed("order", name) % 2**31)
    chosen = [torch.randperm(24, generator=order)[:6].tolist() for _ in range(steps)]
    seed = derive_seed("train", name)
    first, total = finished * STEPS, (finished + 1) * STEPS
    return examples, LocalRound(chosen, first, total, seed, time.monotonic() + 300)


@functools.lru_cache(maxsize=8)
def load_ends(base: Path, partition: Partition, model: str) -> dict[PartyName, Part]:
    """Load a client's parts once; loading them takes thirty times as long as copying them."""
    settings = ModelSettings.model_validate_json(model)
    return load_parts(settings, base, partition, ("head", "tail"))


class Client:
    """A client with its own copies of the parts, as if in a separate process."""

    lifetime = 60.0  # of its invitation to train
    examples = None  # those that it trains on, instead of its own

    def __init__(
        self, name: str, base: Path, split: SplitSettings, adapter=ADAPTER, model=MODEL, noise=0.0
    ) -> None:
        self.name = name
        self.noise = noise
        self.split = split
        partition = partition_of(base, split)
        self.ends = copy.deepcopy(load_ends(base, partition, model.model_dump_json()))
        for part in self.ends.values():
            part.attach(adapter)
        self.losses: list[float] = []
        self.optimizer: State = {}

    @contextmanager
    def lane(self, invitation, busy_until=None):
        split = self.split
        limits = Limits(
            hidden=self.ends["head"].hidden_size,
            wire_dtype=split.wire_dtype,
            max_tokens=LONGEST,
            average_bytes=2**20,  # hostile clients send it anyway
            window=split.window,
        )
        deadline = time.monotonic() + 60
        lane = open_lane(
            invitation,
            limits,
            deadline,
            split.resume_timeout,
            patience=0.0,
            retry_seconds=0.05,
            busy_until=busy_until,
        )
        model = SplitModel(self.ends["head"], self.ends["tail"], lane, 60.0, noise=self.noise)
        try:
            yield model
        finally:
            model.lane.close()

    def train(
        self,
        server: BlockServer,
        state: State,
        steps: int = STEPS,
        train=TRAIN,
        disturb=lambda model: None,
        finished: int = 0,
    ) -> State:
        """Train a round; ``disturb`` may modify the model before training begins."""
        own, local_round = round_of(self.name, steps, finished)
        examples = self.examples or own
        invitation = server.invite_to_train(
            self.name, finished + 1, local_round.seed, self.lifetime
        )
        with self.lane(invitation) as model:
            disturb(model)
            load_state(model.parameters, {n: state[n] for n in model.parameters})
            longest = max(model.columns_before + len(example.tokens) for example in examples)
            model.join(
                RoundPlan(steps, local_round.first_step, local_round.total_steps, local_round.seed),
                max_batch_tokens=train.batch_size * longest,
                deadline=time.monotonic() + 300,
                average_every=self.split.average_every,
            )
            report, self.optimizer = train_round(
                model, model.parameters, examples, 0, local_round, train
            )
            model.end()
        self.losses = report.losses
        return {n: p.detach().cpu().clone() for n, p in model.parameters.items()}


@contextmanager
def serving(
    base: Path,
    state: State,
    split: SplitSettings,
    adapter=ADAPTER,
    train=TRAIN,
    minimum=1,
    max_cached_tokens=MAX_CACHED_TOKENS,
    model=MODEL,
    rounds=1,
    columns=LONGEST,
):
    with BlockServer(
        body=load_body(base, model, split),
        state=take_apart(state, partition_of(base, split)),
        split=split,
        adapter=adapter,
        train=train.model_copy(update={"local_steps": STEPS}),
        run="run",
        rounds=rounds,
        max_batch_tokens=LONGEST,
        max_columns=columns,
        minimum=minimum,
        max_cached_tokens=max_cached_tokens,
    ) as server:
        yield server


def assert_nothing_is_left() -> None:
    """Fail if an autograd graph outlives its micro-batch, or a thread its lane."""
    names = ("lane", "serve", "compute")

    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if any(n in t.name for n in names)]

    wait_until(lambda: not left(), seen=left)
    gc.collect()
    kinds = (Activations, StackedMicroBatch)
    assert not [each for each in gc.get_objects() if isinstance(each, kinds)]


def split_settings(**changes) -> SplitSettings:
    return SplitSettings(**({"wire_dtype": "float32", "activation_budget": 100_000} | changes))


def whole_model(base: Path, state: State, adapter=ADAPTER) -> WholeModel:
    loaded = load_base_model(ModelSettings(name=str(base), dtype="float32"))
    model = WholeModel(attach_adapter(loaded.model, adapter, "base"))
    load_adapter(model.peft_model, state)
    return model


def assert_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value.cpu(), other[name].cpu(), rtol=1e-5, atol=1e-5, msg=name)


def weighted_mean(states: Mapping[str, State]) -> State:
    total = sum(SIZES[name] for name in states)
    shares = {client: SIZES[client] / total for client in states}
    names = next(iter(states.values())).keys()
    return {n: sum(shares[c] * s[n].double() for c, s in states.items()).float() for n in names}


class Center:
    """A reference: the whole model, with a separate head and tail for every client."""

    def __init__(self, base: Path, state: State, split: SplitSettings) -> None:
        self.model = whole_model(base, state)
        names = exported_names(self.model.peft_model)
        self.parameters = {
            names[n]: p for n, p in trainable_parameters(self.model.peft_model).items()
        }
        self.partition = partition_of(base, split)
        self.rate = learning_rate(TRAIN, STEPS)

    def of(self, *parties: str) -> dict[str, torch.nn.Parameter]:
        parts = take_apart(self.parameters, self.partition)
        return join_adapters([parts[party] for party in parties])

    def turn(self, name: str, body_optimizer, state: State) -> tuple[list[float], State]:
        """Train a client's turn with plain gradient steps and two optimizers."""
        ends = self.of("head", "tail")
        load_state(ends, {n: state[n] for n in ends})
        optimizer = make_optimizer(ends, TRAIN)
        examples, local_round = round_of(name)
        lengths = [len(example.tokens) for example in examples]
        losses = []
        for index, step in enumerate(local_round.steps):
            groups = micro_batches(step, lengths, TRAIN.batch_size * max(lengths))
            batches = [collate([examples[i] for i in group], 0) for group in groups]
            targets = sum(len(batch.labels) for batch in batches)
            losses.append(sum(self.model.accumulate(batches, 0)) / targets)
            self.model.clip(TRAIN.max_gradient_norm)
            for each in (optimizer, body_optimizer):
                each.param_groups[0]["lr"] = self.rate(index)
                each.step()
                each.zero_grad()
        return losses, {n: p.detach().cpu().clone() for n, p in ends.items()}


def train_together(
    clients: Sequence[Client],
    server: BlockServer,
    state: State,
    steps: Mapping[str, int],
    settings: Mapping[str, TrainSettings] = {},
    disturbing: Mapping[str, Callable[[SplitModel], None]] = {},
) -> dict[str, State]:
    """Train all clients at once, each in its own thread.

    A disturbed client may fail, but assertions in its ``disturbing`` function may not.
    """
    trained: dict[str, State] = {}
    errors: list[BaseException] = []

    def work(client: Client) -> None:
        name = client.name
        try:
            trained[name] = client.train(
                server,
                state,
                steps[name],
                settings.get(name, TRAIN),
                disturbing.get(name, lambda model: None),
            )
        except BaseException as error:
            if name not in disturbing or isinstance(error, AssertionError):
                errors.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    return trained


class StoppedError(Exception):
    """Raised to make a client leave."""


def stop_after(step: int, count: int, how: str):
    """Return a function that makes a client leave after a number of micro-batches of a step."""

    def disturb(model) -> None:
        lane, receive = model.lane, model.lane.receive
        came, join, joined = [], model.join, []

        def joining(plan, **limits):
            join(plan, **limits)
            joined.append(plan)

        def receiving(timeout):
            begun = step == 0 or (Kind.STEP, step - 1) in came
            if joined and begun and came.count((Kind.GRADIENT, step)) == count:
                if how == "cut":
                    # At once, or the lane opens another stream in between and closes it in order.
                    with lane._changed:
                        lane.detach("cut by the test")
                        lane.fail(LaneCutError("for good"))
                raise StoppedError
            frame = receive(timeout)
            came.append((frame.kind, frame.step))
            return frame

        model.join, lane.receive = joining, receiving

    return disturb


def tokens_taken(server: BlockServer, split: SplitSettings) -> int:
    """Return the used tokens of the activation budget once the current job has ended."""
    server.compute.call(lambda: None)
    return split.activation_budget - server.compute.free_tokens


def bodies_kept() -> int:
    """Count the bodies' caches that are in memory."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is KeyValues]
    return len([o for o in found if o.part.party == "body"])


def send_texts(model, rows=3, columns=11, new_tokens=12, index=0, side="left") -> None:
    """Send the frames of a generation, even if the server must refuse them."""
    tensors = {"hidden": torch.zeros(rows, columns, 32), "lengths": torch.full((rows,), columns)}
    fields = {"side": side} | ({} if new_tokens is None else {"new_tokens": new_tokens})
    model.lane.send(Kind.HIDDEN, 0, index, tensors, fields)
