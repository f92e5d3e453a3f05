"""The body in stages on several hosts, here processes of this machine."""

import gc
import itertools
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from finetuning.data.batching import collate
from finetuning.errors import BaseModelError
from finetuning.settings import ModelSettings
from split.address import parse_address
from split.model.adapters import take_apart
from split.model.partition import partition_of
from split.protocol.errors import LaneError
from split.protocol.evaluation import Prompts
from split.protocol.frames import Padding
from split.server.body import load_body
from split.server.generation_batch import GenerationBatch
from split.server.stage import make_tls_context, open_tls
from tests.marks import nightly
from tests.split.clients import (
    ADAPTER,
    SIZES,
    TRAIN,
    Client,
    StoppedError,
    draw,
    serving,
    split_settings,
    train_together,
)
from tests.split.model.test_generation import GREEDY, SAMPLED, Scene, generated
from tests.split.model.test_prefixes import PREFIX, random_prefix
from tests.split.server.test_candidates import values
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
DRAFTS = GREEDY | {"prompt_lookup_num_tokens": 4, "pad_token_id": 0}


def make_key(folder):
    """Make a key with the command in docs/operations.md; return its file."""
    command = "openssl req -x509 -newkey rsa:3072 -nodes -days 3650 -subj /CN=stage"
    command += " -keyout stage.pem -out stage.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=folder)
    return folder / "stage.pem"


@contextmanager
def stage(key):
    """Start a stage on a free port; yield its address and process."""
    log = Path(tempfile.mkstemp(dir=key.parent)[1])
    command = [sys.executable, "-m", "chambers", "stage", "--listen", "127.0.0.1:0", "--key", key]
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            wait_until(lambda: "waiting" in log.read_text(), 120.0, log.read_text)
            yield re.search(r"127.0.0.1:\d+", log.read_text())[0], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    return make_key(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="module")
def two(key):
    """The settings for two stages, which the tests use one after another."""
    with stage(key) as (one, _), stage(key) as (other, _):
        yield {"body_hosts": f"{one},{other}", "body_key": str(key)}


def results_of(base, state, split, adapter, model):
    """Train three clients, and evaluate the result and the base model; return all numbers."""
    clients = [Client(name, base, split, adapter, model) for name in SIZES]
    train = TRAIN.model_copy(update={"optimizer_state": "keep"})
    apart, ends = take_apart(state, partition_of(base, split)), {}
    own = apart["head"] | apart["tail"]
    with serving(base, state, split, adapter, train, model=model) as server:
        server.begin_round(SIZES, 0)
        if split.schedule == "serial":
            for client in clients:
                ends[client.name] = client.train(server, own, 3)
                server.finish_lanes()
        else:
            ends = train_together(clients, server, own, dict.fromkeys(SIZES, 3))
            assert not any(account.error for account in server.finish_lanes())
        bodies = {f"body of {client}": server.state_of(client) for client in SIZES}
        results = ends | bodies | {"body": server.end_round(SIZES)}
        results["optimizer"] = server.export_optimizers()
        models = {"first": apart["body"], "global": results["body"], "base": None}
        invitation = server.invite_to_evaluate("alpha", 1, models, 60.0)
        with clients[0].lane(invitation) as split_model:
            for name in models:
                split_model.choose(name, None if name == "base" else ends["alpha"])
                losses = split_model.summed_losses([collate(draw(3, 7), 0)])
                results[f"losses of {name}"] = {"": torch.tensor(losses)}
    return {f"{key}/{n}": value for key, found in results.items() for n, value in found.items()}


@pytest.mark.parametrize(
    "what", [nightly("serial"), "client-batch", "hierarchical", "prefix", nightly("recompute")]
)
def test_stages_compute_what_one_process_computes(base, beginning, two, what):
    """To the last bit, dropout and clipping included."""
    adapter = ADAPTER.model_copy(update={"dropout": 0.3})
    if what == "prefix":
        adapter, beginning = PREFIX, random_prefix(base)
    schedule = "serial" if what in ("prefix", "recompute") else what
    split = split_settings(schedule=schedule, average_every=2 * (what == "hierarchical"))
    model = ModelSettings(
        name=str(base), dtype="float32", gradient_checkpointing=what == "recompute"
    )
    expected = results_of(base, beginning, split, adapter, model)
    found = results_of(base, beginning, split.model_copy(update=two), adapter, model)
    assert found.keys() == expected.keys() and len(found) > 20
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_stages_compute_different_micro_batches_at_the_same_time(base, two):
    """The second stage begins each micro-batch only after the first has begun the next one."""
    body = load_body(base, ModelSettings(name=str(base), dtype="float32"), split_settings(**two))
    body.attach(ADAPTER, "own")
    first, second = (stage.run_blocks for stage in body.stages)
    begun = [threading.Event() for _ in range(4)]
    at_first, at_second = iter(begun), iter(begun[1:])

    def note(*arguments, **fields):
        next(at_first).set()
        return first(*arguments, **fields)

    def wait(*arguments, **fields):
        assert next(at_second).wait(60)
        return second(*arguments, **fields)

    body.stages[0].run_blocks, body.stages[1].run_blocks = note, wait
    padding, size = Padding("right", torch.tensor([5, 3])), (2, 5, body.hidden_size)
    passes = [body.start(torch.randn(size), padding) for _ in range(3)]
    begun[3].set()  # nothing follows the last micro-batch
    for each in passes:
        each.result(120)
    body.close()
    with pytest.raises(ConnectionError, match="was closed"):
        body.start(torch.randn(size), padding).result(60)
    with pytest.raises(ConnectionError, match="was closed"):
        body.remove("own")  # doesn't wait for the pass that failed


def test_what_finished_or_abandoned_passes_need_is_freed_at_once(base, two):
    body = load_body(base, ModelSettings(name=str(base), dtype="float32"), split_settings(**two))
    body.attach(ADAPTER, "own")
    body.use("own")
    padding = Padding("right", torch.tensor([5, 5]))
    hidden = torch.randn(2, 5, body.hidden_size, requires_grad=True)
    gc.disable()
    try:
        abandoned, finished = (body.start(hidden, padding).result(60) for _ in range(2))
        body.propagate_back(finished, torch.ones_like(finished.output)).result(60)
        body.discard(abandoned)
        numbers = abandoned.passes
        kept = [weakref.ref(hidden), weakref.ref(finished.output)]
        del abandoned, finished, hidden
        wait_until(lambda: not any(each() is not None for each in kept), 10.0)
    finally:
        gc.enable()
    for number, each in zip(numbers, body.stages, strict=True):
        with pytest.raises(RuntimeError, match="KeyError"):
            each.call("backward", {"gradient": torch.zeros(1)}, number=number)
    prompts = Prompts(0, 0, torch.randn(1, 5, 3), Padding("left", torch.tensor([5])), 9)
    with pytest.raises(RuntimeError, match="failed"):  # the hidden states are too small
        GenerationBatch(body, ADAPTER, None).begin(prompts, None, None)
    for number, each in itertools.product(range(40), body.stages):
        with pytest.raises(RuntimeError, match="KeyError"):
            each.call("repeat", number=number, times=1)
    body.close()


def test_a_late_answer_is_not_taken_for_that_of_another_call(base, key):
    model = ModelSettings(name=str(base), dtype="float32")
    with stage(key) as (address, process):
        body = load_body(base, model, split_settings(body_hosts=address, body_key=str(key)))
        body.stages[0]._stream.settimeout(0.5)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionError, match=f"the stage at {address} is lost: .*timed out"):
            body.attach(ADAPTER, "own")
        process.send_signal(signal.SIGCONT)
        with pytest.raises(ConnectionError, match=f"the stage at {address} is lost"):
            body.attach(ADAPTER, "other")
        body.close()


@pytest.mark.parametrize("kind", ["lora", nightly("prefix")])
def test_texts_and_candidates_equal_the_whole_models(random_checkpoint, two, kind):
    """Drafts, which are dropped from the caches, included; at the end, stages cache nothing."""
    scene = Scene(random_checkpoint("Llama"), "Llama", PREFIX if kind == "prefix" else None, **two)
    whole, client = scene.whole(), scene.client()
    repeated = torch.tensor([[5, 6, 7, 8] * 3]), torch.ones(1, 12).long()
    model = ModelSettings(name=str(scene.directory), dtype="float32")
    with scene.serving(max_cached_tokens=400, model=model) as server:
        with scene.lane(server, client) as model:
            scene.choose(model)
            for settings in (GREEDY, SAMPLED):
                assert torch.equal(generated(model, **settings), generated(whole, **settings))
            if kind == "lora":  # PEFT's prefixes don't work with drafts
                drafted, alone = (m.generate(*repeated, 24, **DRAFTS) for m in (model, whole))
                assert torch.equal(drafted, alone)
            assert values(model) == pytest.approx(values(whole), abs=1e-5)
            model.end()
        (account,) = server.finish_lanes()
        for each in server.body.stages:
            for number in range(20):
                with pytest.raises(RuntimeError, match="KeyError"):
                    each.call("repeat", number=number, times=1)
    assert not account.error


@pytest.mark.parametrize("schedule", [nightly("serial"), "client-batch"])
def test_a_killed_stage_is_named_to_the_clients(base, beginning, key, two, schedule):
    model = ModelSettings(name=str(base), dtype="float32")
    first = two["body_hosts"].partition(",")[0]
    with stage(key) as (address, process):
        hosts = {"body_hosts": f"{first},{address}", "body_key": str(key)}
        split = split_settings(schedule=schedule, **hosts)

        def kill(split_model):
            """Kill the stage between the forward and the backward pass."""
            send = split_model.body.send_gradient

            def sending(*arguments):
                process.kill()
                process.wait()
                send(*arguments)

            split_model.body.send_gradient = sending

        with serving(base, beginning, split, model=model) as server:
            server.begin_round({"alpha": 9}, 0)
            with pytest.raises(LaneError, match=f"the stage at {address} is lost"):
                Client("alpha", base, split, model=model).train(server, beginning, disturb=kill)
    load_body(base, model, split_settings(**two)).close()  # the other stage is free again


def test_a_stage_frees_the_activations_of_a_client_that_has_left(base, beginning, two):
    model, split = ModelSettings(name=str(base), dtype="float32"), split_settings(**two)
    gradients = []

    def leave(split_model):
        """Leave between the forward and the backward pass."""

        def stop(index, gradient):
            gradients.append(gradient)
            raise StoppedError

        split_model.body.send_gradient = stop

    with serving(base, beginning, split, model=model) as server:
        server.begin_round({"alpha": 9}, 0)
        with pytest.raises(StoppedError):
            Client("alpha", base, split, model=model).train(server, beginning, disturb=leave)
        server.finish_lanes()
        for each in server.body.stages:
            with pytest.raises(RuntimeError, match="KeyError: 1"):
                each.call("backward", {"gradient": gradients[0]}, number=1)


def test_other_programs_and_other_keys_are_refused(base, key, two, tmp_path):
    model, address = ModelSettings(name=str(base), dtype="float32"), two["body_hosts"].split(",")[0]
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as other:
        other.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with (
        socket.create_connection((host, int(port))) as plain,
        open_tls(plain, make_tls_context(key, ssl.PROTOCOL_TLS_CLIENT), is_server=False) as cut,
    ):
        cut.sendall((100).to_bytes(8) + b"{}\n")
    load_body(base, model, split_settings(**two)).close()
    others = two | {"body_key": str(make_key(tmp_path))}
    with pytest.raises(ConnectionError, match=rf"{address}.*(can't be used|is lost)"):
        load_body(base, model, split_settings(**others))
    load_body(base, model, split_settings(**two)).close()


def client_hello():
    """Return the first message of a TLS handshake."""
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), sent, server_hostname="stage"
        ).do_handshake()
    return sent.read()


def is_over(connection, sent=b""):
    """Send on a connection; return whether the other end has closed it."""
    try:
        connection.sendall(sent)
        connection.settimeout(0.0)
        return not any(iter(lambda: connection.recv(4096), b""))
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_without_the_key_delay_nothing(base, two):
    """Silent ones, a handshake that continues byte by byte, and an unanswered handshake."""
    model, address = ModelSettings(name=str(base), dtype="float32"), two["body_hosts"].split(",")[0]
    hello = client_hello()
    with ExitStack() as stack:

        def connect(sent=b""):
            made = stack.enter_context(socket.create_connection(parse_address(address)))
            made.sendall(sent)
            return made

        silent = [connect() for _ in range(80)]
        # At most 64 are kept, for at most 10 seconds.
        wait_until(lambda: sum(map(is_over, silent)) >= 16, 8.0)
        slow, unanswered = connect(hello[:20]), connect(hello)
        body = load_body(base, model, split_settings(**two))
        connect(b"GET / HTTP/1.0\r\n\r\n")
        dripped = iter(hello[20:])
        wait_until(lambda: is_over(slow, bytes([next(dripped, 0)])), 25.0)
        wait_until(lambda: is_over(unanswered) and all(map(is_over, silent)), 25.0)
        # The run has not been disturbed.
        body.attach(ADAPTER, "after")
        body.close()


def test_a_stage_is_for_one_run_at_a_time(base, two, monkeypatch):
    model = ModelSettings(name=str(base), dtype="float32")
    first, loaded = load_body(base, model, split_settings(**two)), []
    with monkeypatch.context() as patched:
        patched.setattr("split.server.stage._CONNECT_SECONDS", 1.0)
        with pytest.raises(ConnectionError, match=r"timed out.*and for no other run"):
            load_body(base, model, split_settings(**two))
    thread = threading.Thread(
        target=lambda: loaded.append(load_body(base, model, split_settings(**two)))
    )
    thread.start()
    assert not loaded
    first.close()
    thread.join(30)
    loaded[0].close()


def test_other_checkpoints_and_unsuitable_hosts_are_refused(base, random_checkpoint, two):
    other = random_checkpoint("Llama", num_hidden_layers=6)
    model = ModelSettings(name=str(base), dtype="float32")
    with pytest.raises(RuntimeError, match="differs from the coordinator's"):
        load_body(other, model, split_settings(**two))
    first = two["body_hosts"].partition(",")[0]
    for change in (
        {"head_blocks": 3, "tail_blocks": 2, **two},  # one block
        {**two, "body_hosts": f"{first},{first}"},
    ):
        with pytest.raises(BaseModelError, match="different hosts, at most"):
            load_body(base, model, split_settings(**change))
