"""Training through lanes equals training in one process: every loss, every final weight."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from finetuning.adapters import (
    State,
    attach_adapter,
    export_adapter,
    exported_names,
    initial_adapter,
    load_adapter,
    trainable_parameters,
)
from finetuning.base_model import load_base_model
from finetuning.data.batching import collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.evaluation import held_out_loss
from finetuning.optimization import learning_rate, make_optimizer
from finetuning.randomness import derive_seed
from finetuning.settings import AdapterSettings, ModelSettings, SplitSettings, TrainSettings
from finetuning.training import Round, train_round
from finetuning.whole_model import WholeModel
from split.adapters import join_adapters, take_apart
from split.block_server import BlockServer
from split.branch import load_state
from split.client import ClientRound, SplitModel
from split.frames import Limits
from split.lane import connect
from split.loading import load_parts
from split.partition import cut_of

STEPS = 20
LONGEST = 4 * 20
ADAPTER = AdapterSettings(rank=2, alpha=4, dropout=0.0, targets="q_proj,v_proj,down_proj")
TRAIN = TrainSettings(
    batch_size=2, accumulation=3, learning_rate=5e-3, max_gradient_norm=0.5, schedule="cosine"
)
SIZES = {"alpha": 9, "beta": 6, "gamma": 3}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A random Llama of six blocks with the small checkpoint's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("six-blocks")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def beginning(base: Path) -> State:
    """An adapter that already does something."""
    state, _ = initial_adapter(str(base), ADAPTER, 5)
    torch.manual_seed(6)
    return {name: 0.2 * torch.randn_like(value) for name, value in state.items()}


def draw(count: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        length = int(torch.randint(4, 21, (), generator=generator))
        prompt = int(torch.randint(1, length - 1, (), generator=generator))
        tokens = torch.randint(2, 64, (length,), generator=generator)
        examples.append(Example(tokens, torch.arange(length) >= prompt, prompt, ""))
    return examples


def place_of(name: str, steps: int = STEPS) -> tuple[list[Example], Round]:
    """Give a client's examples, and which of them each step is made of."""
    examples = draw(24, derive_seed("examples", name) % 2**31)
    order = torch.Generator().manual_seed(derive_seed("order", name) % 2**31)
    chosen = [torch.randperm(24, generator=order)[:6].tolist() for _ in range(steps)]
    seed = derive_seed("train", name)
    return examples, Round(chosen, 0, STEPS, seed, time.monotonic() + 300)


class Client:
    """A client with parts of its own, as a process of its own would have."""

    def __init__(self, name: str, base: Path, split: SplitSettings, adapter=ADAPTER) -> None:
        self.name = name
        self.split = split
        cut = cut_of(base, split)
        self.ends = load_parts(ModelSettings(), base, cut, ("head", "tail"))
        for part in self.ends.values():
            part.attach(adapter)
        self.losses: list[float] = []
        self.optimizer: State = {}

    @contextmanager
    def lane(self, invitation):
        lane = connect(
            invitation.address,
            invitation.ticket,
            invitation.identity,
            invitation.server_key,
            invitation.suite,
            Limits(self.ends["head"].hidden_size, self.split.wire_dtype, LONGEST),
            time.monotonic() + 60,
        )
        try:
            yield SplitModel(self.ends["head"], self.ends["tail"], lane, 60.0)
        finally:
            lane.close()

    def train(self, server: BlockServer, state: State, steps: int = STEPS, train=TRAIN) -> State:
        examples, place = place_of(self.name, steps)
        invitation = server.invite_to_train(self.name, 1, place.seed, 60.0)
        with self.lane(invitation) as model:
            load_state(model.parameters, {n: state[n] for n in model.parameters})
            longest = train.batch_size * max(len(example.tokens) for example in examples)
            model.join(
                ClientRound(
                    steps, 0, STEPS, longest, self.split.average_every, time.monotonic() + 300
                )
            )
            report, self.optimizer = train_round(model, model.parameters, examples, 0, place, train)
            model.end()
        self.losses = report.losses
        return {n: p.detach().clone() for n, p in model.parameters.items()}


@contextmanager
def serving(base: Path, state: State, split: SplitSettings, adapter=ADAPTER, train=TRAIN):
    cut = cut_of(base, split)
    body = load_parts(ModelSettings(), base, cut, ("body",))["body"]
    server = BlockServer(body, take_apart(state, cut), split, adapter, train, "run", LONGEST, 1)
    try:
        yield server
    finally:
        server.stop()


def split_settings(**changes) -> SplitSettings:
    return SplitSettings(**({"wire_dtype": "float32", "activation_budget": 100_000} | changes))


def whole_model(base: Path, state: State, adapter=ADAPTER) -> WholeModel:
    loaded = load_base_model(ModelSettings(name=str(base)))
    model = WholeModel(attach_adapter(loaded.model, adapter, "base"))
    load_adapter(model.peft_model, state)
    return model


def assert_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5, msg=name)


def weighted_mean(states: Mapping[str, State]) -> State:
    total = sum(SIZES[name] for name in states)
    shares = {client: SIZES[client] / total for client in states}
    names = next(iter(states.values())).keys()
    return {n: sum(shares[c] * s[n].double() for c, s in states.items()).float() for n in names}


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (0, 1)], ids=str)
def test_one_client_equals_centralised_training(base, beginning, cut):
    split = split_settings(head_blocks=cut[0], tail_blocks=cut[1])
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9})
        client = Client("alpha", base, split)
        ends = client.train(server, beginning)
        (account,) = server.finish_lanes()
        body = server.end_round({"alpha": 9})
    model = whole_model(base, beginning)
    examples, place = place_of("alpha")
    report, _ = train_round(
        model, trainable_parameters(model.peft_model), examples, 0, place, TRAIN
    )
    assert client.losses == pytest.approx(report.losses, abs=1e-5)
    assert_close(join_adapters([ends, body]), export_adapter(model.peft_model))
    assert report.gradient_norm > TRAIN.max_gradient_norm  # clipping had something to do
    assert (account.steps, account.error) == (STEPS, "")


class Center:
    """A reference: the whole model, of which every client has heads and tails of its own."""

    def __init__(self, base: Path, state: State, split: SplitSettings) -> None:
        self.model = whole_model(base, state)
        names = exported_names(self.model.peft_model)
        self.parameters = {
            names[n]: p for n, p in trainable_parameters(self.model.peft_model).items()
        }
        self.cut = cut_of(base, split)
        self.rate = learning_rate(TRAIN, STEPS)

    def of(self, *parties: str) -> dict[str, torch.nn.Parameter]:
        parts = take_apart(self.parameters, self.cut)
        return join_adapters([parts[party] for party in parties])

    def turn(self, name: str, body_optimizer, state: State) -> tuple[list[float], State]:
        """Train a client's turn with plain gradient steps and two optimizers."""
        ends = self.of("head", "tail")
        load_state(ends, {n: state[n] for n in ends})
        optimizer = make_optimizer(ends, TRAIN)
        examples, place = place_of(name)
        lengths = [len(example.tokens) for example in examples]
        losses = []
        for index, step in enumerate(place.steps):
            groups = micro_batches(step, lengths, TRAIN.batch_size * max(lengths))
            batches = [collate([examples[i] for i in group], 0) for group in groups]
            targets = sum(len(batch.labels) for batch in batches)
            losses.append(sum(self.model.accumulate(batches, 0)) / targets)
            self.model.clip(TRAIN.max_gradient_norm)
            for each in (optimizer, body_optimizer):
                each.param_groups[0]["lr"] = self.rate(index)
                each.step()
                each.zero_grad()
        return losses, {n: p.detach().clone() for n, p in ends.items()}


def test_turns_equal_copies_of_head_and_tail_around_one_body(base, beginning):
    split = split_settings()
    trained, losses = {}, {}
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES)
        for name in SIZES:
            client = Client(name, base, split)
            trained[name] = client.train(server, beginning)
            losses[name] = client.losses
        server.finish_lanes()
        body = server.end_round(SIZES)
    center = Center(base, beginning, split)
    body_optimizer = make_optimizer(center.of("body"), TRAIN)
    for name in SIZES:
        expected, ends = center.turn(name, body_optimizer, beginning)
        assert losses[name] == pytest.approx(expected, abs=1e-5)
        assert_close(trained[name], ends)
    assert_close(body, {n: p.detach() for n, p in center.of("body").items()})


def train_together(
    clients: Sequence[Client], server: BlockServer, state: State, steps: Mapping[str, int]
) -> dict[str, State]:
    """Train all clients at once, each in a thread of its own."""
    trained: dict[str, State] = {}
    errors: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            trained[client.name] = client.train(server, state, steps[client.name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    return trained


def test_hierarchical_equals_separate_trainings_and_their_mean(base, beginning):
    split = split_settings(schedule="hierarchical")
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES)
        trained = train_together(clients, server, beginning, dict.fromkeys(SIZES, STEPS))
        server.finish_lanes()
        whole = {n: join_adapters([trained[n], server.state_of(n)]) for n in SIZES}
        body = server.end_round(SIZES)
    expected = {}
    for client in clients:
        model = whole_model(base, beginning)
        examples, place = place_of(client.name)
        parameters = trainable_parameters(model.peft_model)
        report, _ = train_round(model, parameters, examples, 0, place, TRAIN)
        expected[client.name] = export_adapter(model.peft_model)
        assert client.losses == pytest.approx(report.losses, abs=1e-5)
        assert_close(whole[client.name], expected[client.name])
    mean = weighted_mean(expected)
    assert_close(body, {n: mean[n] for n in body})


def test_averaging_within_a_round_equals_lockstep_with_averages(base, beginning):
    every, steps = 5, {"alpha": 20, "beta": 12, "gamma": 10}
    split = split_settings(schedule="hierarchical", average_every=every)
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES)
        trained = train_together(clients, server, beginning, steps)
        server.finish_lanes()
        whole = {n: join_adapters([trained[n], server.state_of(n)]) for n in SIZES}
    states, optimizers = dict.fromkeys(SIZES, beginning), {name: {} for name in SIZES}
    model = whole_model(base, beginning)
    for start in range(0, STEPS, every):
        going = [name for name in SIZES if steps[name] > start]
        if start:
            mean = weighted_mean({name: states[name] for name in going})
            states |= dict.fromkeys(going, mean)
        for name in going:
            load_adapter(model.peft_model, states[name])
            examples, place = place_of(name)
            chosen = place.steps[start : min(start + every, steps[name])]
            part = Round(chosen, start, STEPS, 0, place.deadline)
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
def test_a_window_changes_nothing_with_dropout_and_whatever_the_wire(base, beginning, wire):
    adapter = ADAPTER.model_copy(update={"dropout": 0.3})
    results = []
    for window in (1, 4):
        split = split_settings(window=window, wire_dtype=wire)
        with serving(base, beginning, split, adapter) as server:
            server.begin_round({"alpha": 9})
            client = Client("alpha", base, split, adapter)
            ends = client.train(server, beginning, 6)
            server.finish_lanes()
            results.append((client.losses, ends | server.end_round({"alpha": 9})))
    (losses, state), (others, other) = results
    assert losses == others
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_a_split_model_measures_the_loss_of_the_whole(base, beginning):
    split = split_settings()
    examples = draw(17, 1)
    cut = cut_of(base, split)
    parts = take_apart(beginning, cut)
    ends = parts["head"] | parts["tail"]
    with serving(base, beginning, split) as server:
        client = Client("alpha", base, split)
        models = {"base": None, "global": parts["body"]}
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            model.choose("global", ends)
            adapted = held_out_loss(model, examples, 0, 3)
            model.choose("base", None)
            bare = held_out_loss(model, examples, 0, 3)
            model.end()
    whole = whole_model(base, beginning)
    assert adapted == held_out_loss(whole, examples, 0, 3)
    with whole.peft_model.disable_adapter():
        assert bare == held_out_loss(whole, examples, 0, 3)
    assert adapted != bare


def test_optimizers_go_on_or_start_anew(base, beginning):
    train = TRAIN.model_copy(update={"optimizer_state": "keep"})
    split = split_settings()
    with serving(base, beginning, split, train=train) as server:
        server.begin_round({"alpha": 9})
        Client("alpha", base, split).train(server, beginning, 4, train)
        server.finish_lanes()
        before = server.export_optimizers()
        assert before and all(name.startswith("body/") for name in before)
        server.begin_round({"alpha": 9})
        assert all(torch.equal(v, server.export_optimizers()[n]) for n, v in before.items())
    with serving(base, beginning, split) as server:
        server.load_optimizers(before)
        assert server.export_optimizers().keys() == before.keys()
        server.begin_round({"alpha": 9})
        assert not server.export_optimizers()
