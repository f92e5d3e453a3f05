"""FL-GLM through the real strategy, the real ClientApp and real lanes, in one process."""

import functools
import json
import shutil
import socket
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from flwr.app import MessageType
from safetensors.torch import load_file, save_file

from chambers.in_process import InProcessGrid
from client_app import fl_glm
from client_app.institution import open_institution
from federation.messages import ARRAYS, SIZE, Instruction, config_of, make_reply, one_line
from federation.run_config import ConfigError, parse_run_config
from finetuning.errors import BaseModelError
from split.client import connecting
from split.client.remote_body import RemoteBody
from split.lane.dialling import open_lane
from split.protocol.frames import Kind
from strategies import journal as journals
from strategies.participants import RefusedError
from tests.conftest import config
from tests.finetuning.data.templates import THINKING
from tests.gguf_files import write_gguf
from tests.in_process import MemoryJournal, run_in_process
from tests.marks import nightly
from tests.strategies.conftest import split_config
from tests.strategies.grids import start
from tests.waiting import wait_until


def run(values, tmp_path):
    return run_in_process(values, tmp_path / "state", 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, deep_checkpoint, client_folders):
    """Return a cached function that trains with a schedule and returns folder and journal."""

    @functools.cache
    def train(schedule):
        folder = tmp_path_factory.mktemp(schedule)
        values = split_config(config(deep_checkpoint, client_folders), deep_checkpoint)
        return folder, run(values | {"split.schedule": schedule, "rounds": 3}, folder)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["serial", nightly("hierarchical")])
def test_clients_and_server_learn(finished, schedule):
    _, journal = finished(schedule)
    assert json.loads(json.dumps(journal.events)) == journal.events
    trained = [e for e in journal.events if e["event"] == "train"]
    assert all(e["bytes_up"] > 0 and e["seconds_waiting"] >= 0 for e in trained)
    losses = {
        (e["round"], e["client"], e["model"]): e["loss"]
        for e in journal.events
        if e["event"] == "evaluate"
    }
    for client in ("alpha", "beta", "gamma"):
        assert losses[3, client, "global"] < losses[0, client, "base"]
    lanes = [e for e in journal.events if e["event"] == "lane"]
    assert {e["client"] for e in lanes} == {"alpha", "beta", "gamma"}
    assert not [e for e in lanes if e["error"]]
    trained = [e for e in lanes if e["purpose"] == "train"]
    assert len(trained) == 9 and all(e["steps"] > 0 and e["bytes_up"] > 0 for e in trained)


@pytest.mark.parametrize("every", [0, 1])
def test_clients_accept_an_average_where_something_is_averaged(
    split_values, tmp_path, monkeypatch, every
):
    accepted = []

    def opening(*, limits, **others):
        accepted.append(limits.max_payload_bytes(Kind.AVERAGE))
        return open_lane(limits=limits, **others)

    monkeypatch.setattr(connecting, "open_lane", opening)
    averaging = {"split.schedule": "hierarchical", "split.average-every": every}
    values = split_values | averaging | {"rounds": 1, "min-nodes": 1, "train.local-steps": 2}
    journal = run_in_process(values, tmp_path / "state", 1)
    assert not [e for e in journal.events if e["event"] == "lane" and e["error"]]
    assert [most > 0 for most in accepted] == [False, every > 0, False]


@pytest.mark.slow
def test_all_parts_are_averaged_by_data_size(finished):
    _, journal = finished("hierarchical")
    shares = {"alpha": 24 / 44, "beta": 12 / 44, "gamma": 8 / 44}
    for number, kept in journal.personalised_by_round.items():
        assert kept.keys() == shares.keys()
        for name, averaged in journal.adapters[number].items():
            expected = sum(share * kept[client][name] for client, share in shares.items())
            torch.testing.assert_close(averaged, expected, rtol=1e-5, atol=1e-6, msg=name)
            assert not torch.equal(averaged, kept["alpha"][name])


@pytest.mark.slow
def test_a_gguf_file_trains_as_its_checkpoint_does(split_values, deep_checkpoint, tmp_path):
    file = write_gguf(deep_checkpoint, tmp_path / "model.gguf")
    values = split_values | {"rounds": 1, "train.local-steps": 1}
    losses = [
        [e["loss"] for e in run(values | {"model.name": str(name)}, folder).events if "loss" in e]
        for name, folder in ((deep_checkpoint, tmp_path / "one"), (file, tmp_path / "other"))
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3 * 4


def test_a_template_that_divides_rows_makes_more_steps_of_them(
    split_values, deep_checkpoint, tmp_path
):
    """Four rows with three answers each give twelve examples, four in each step."""
    model, data = tmp_path / "model", tmp_path / "data" / "alpha"
    shutil.copytree(deep_checkpoint, model)
    (model / "chat_template.jinja").write_text(THINKING)
    data.mkdir(parents=True)
    turns = [{"role": role, "content": "the court"} for role in ("user", "assistant")] * 3
    for part in ("train", "test"):
        (data / f"{part}.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    values = split_values | {"model.name": str(model), "data.path": str(data.parent), "rounds": 1}
    journal = run_in_process(values | {"min-nodes": 1}, tmp_path / "state", 1)
    (trained,) = (event for event in journal.events if event["event"] == "train")
    assert (trained["examples"], trained["steps"]) == (4, 3)


@pytest.mark.parametrize("order", [nightly("names"), "shuffled"])
def test_the_order_of_serial_turns(split_values, tmp_path, order):
    fast = {"rounds": 4, "train.local-steps": 1, "evaluate.every": 4}
    journal = run(split_values | {"split.order": order} | fast, tmp_path)
    turns: dict[int, list[str]] = {}
    for lane in journal.events:
        if lane["event"] == "lane" and lane["purpose"] == "train":
            turns.setdefault(lane["round"], []).append(lane["client"])
    by_name = [each == sorted(each) for each in turns.values()]
    assert len(by_name) == 4 and all(by_name) == (order == "names")


def test_both_schedules_agree_on_one_client(split_values, tmp_path):
    values = split_values | {"min-nodes": 1, "train.local-steps": 2}
    results = [
        run_in_process(values | {"split.schedule": schedule}, tmp_path / schedule, 1).adapters[2]
        for schedule in ("serial", "hierarchical")
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.slow
def test_what_a_split_run_leaves_loads_with_peft_alone(split_values, finished):
    """The loss equals the one that was measured through lanes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finetuning.evaluation.held_out import held_out_loss
    from finetuning.whole_model import WholeModel

    folder, journal = finished("serial")
    measured = {
        (e["client"], e["model"]): e["loss"]
        for e in journal.events
        if e["event"] == "evaluate" and e["round"] == 3
    }
    config = parse_run_config(split_values)
    for partition, client in enumerate(("alpha", "beta", "gamma")):
        node = {"partition-id": partition, "num-partitions": 3}
        institution = open_institution(config, node)
        assert institution.name == client
        for kind in ("global", "personalised"):
            (directory,) = (folder / "state").glob(f"*/{client}/adapters/{kind}")
            whole = AutoModelForCausalLM.from_pretrained(config.model.name)
            model = WholeModel(PeftModel.from_pretrained(whole, directory))
            loss = held_out_loss(model, institution.test, institution.padding, 8).loss
            assert loss == pytest.approx(measured[client, kind], abs=1e-5)
        about = json.loads((directory.parent.parent / "base-model.json").read_text())
        assert about["digests"] == institution.fingerprint
        kept = load_file(directory / "adapter_model.safetensors")
        assert all(torch.equal(kept[name], journal.kept[client][name]) for name in kept)


@pytest.mark.slow
def test_answers_through_lanes_are_those_of_the_exported_models(split_values, tmp_path):
    """So are the scores of the base model before round 1, and of adapters after the last round."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finetuning.evaluation.generation import generate_texts
    from finetuning.evaluation.scoring import score
    from finetuning.model.tokenizer import load_tokenizer
    from finetuning.whole_model import WholeModel

    names = ["rouge1", "rouge2", "rougeL", "bleu4", "bleu_n"]
    answering = {"generate": True, "generate-examples": 4, "batch-size": 3, "max-new-tokens": 12}
    answering["show-answers"] = 2
    values = split_values | {f"evaluate.{key}": value for key, value in answering.items()}
    # Train until the random model generates some of the words.
    values |= {"adapter.rank": 16, "train.epochs": 8, "train.learning-rate": 2e-2}
    values |= {"adapter.targets": "q_proj,v_proj,up_proj,down_proj,lm_head"}
    journal = run(values, tmp_path)
    measured = {
        (e["client"], e["model"]): {name: e[name] for name in names}
        for e in journal.events
        if e["event"] == "evaluate" and e["round"] in (0, 2)
    }
    shown = {
        (e["client"], e["model"]): [make_reply["text"] for make_reply in e["answers"]]
        for e in journal.events
        if e["event"] == "answers"
    }
    config = parse_run_config(values)
    for partition, client in enumerate(("alpha", "beta", "gamma")):
        node = {"partition-id": partition, "num-partitions": 3}
        institution = open_institution(config, node)
        tokenizer = load_tokenizer(institution.directory)
        for kind in ("base", "global", "personalised"):
            adapter = "global" if kind == "base" else kind
            (directory,) = (tmp_path / "state").glob(f"*/{client}/adapters/{adapter}")
            whole = AutoModelForCausalLM.from_pretrained(config.model.name)
            model = PeftModel.from_pretrained(whole, directory)
            prompts = [prompt.tokens for prompt in institution.asked]
            assert len(prompts) == 4
            with model.disable_adapter() if kind == "base" else nullcontext():
                answers = generate_texts(WholeModel(model), tokenizer, prompts, 3, 12)
            scores = score(answers, [prompt.reference for prompt in institution.asked])
            assert {name: scores[name] for name in names} == measured[client, kind]
            assert shown[client, kind] == [one_line(make_reply) for make_reply in answers[:2]]
    assert max(scores["rouge1"] for scores in measured.values()) > 0


@pytest.mark.parametrize("schedule", [nightly("serial"), "hierarchical"])
@pytest.mark.parametrize(
    ("replies", "reason"), [(False, "round-timeout"), (True, "it replied, but did not finish")]
)
def test_a_client_that_breaks_off_is_left_out_and_named(
    split_values, tmp_path, schedule, replies, reason, monkeypatch
):
    """Beta stops in round 2, and reports it or replies as usual; the others continue."""
    values = split_values | {"split.schedule": schedule, "min-nodes": 2, "train.local-steps": 1}
    train, end = fl_glm.train_round, RemoteBody.end
    late = False

    def stopping(*, local_round, description, **others):
        nonlocal late
        late = description == "beta, round 2"
        if late and not replies:
            local_round = replace(local_round, deadline=0.0)
        return train(local_round=local_round, description=description, **others)

    def breaking_off(body, until=None):
        if late and replies:
            body._lane.close()
        else:
            end(body, until)

    monkeypatch.setattr(fl_glm, "train_round", stopping)
    monkeypatch.setattr(RemoteBody, "end", breaking_off)
    journal = run_in_process(values, tmp_path / "state", 3)
    (last,) = [e for e in journal.events if e["event"] == "round" and e["round"] == 2]
    assert last["participants"] == ["alpha", "gamma"]
    (left_out,) = last["left_out"]
    assert left_out["client"] == "beta" and reason in left_out["reason"]
    broken = [e for e in journal.events if e["event"] == "lane" and e["error"]]
    assert [(e["client"], e["steps"] > 0) for e in broken] == [("beta", replies)]


def test_a_client_that_replies_without_a_lane_is_named(split_values, tmp_path):
    """Gamma returns what it was sent, with the metrics of a round that it has not trained."""

    class Idle(InProcessGrid):
        def _answer(self, message):
            if (
                message.metadata.message_type != MessageType.TRAIN
                or message.metadata.dst_node_id != 3
            ):
                return super()._answer(message)
            config = {"name": "gamma", "base": Instruction.of(message).base}
            arrays = message.content[ARRAYS]
            return make_reply(message, config, {SIZE: 8, "loss": 1.0}, arrays)

    values = split_values | {"rounds": 1, "min-nodes": 2, "train.local-steps": 1}
    values |= {"state-path": str(tmp_path)}
    nodes = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    journal = run_in_process(values, tmp_path, 3, Idle(values, nodes))
    (event,) = [e for e in journal.events if e["event"] == "round"]
    assert event["participants"] == ["alpha", "beta"]
    (left_out,) = event["left_out"]
    assert left_out["client"] == "gamma" and "it opened no lane" in left_out["reason"]


@pytest.mark.slow
def test_the_last_counted_adapter_survives(split_values, tmp_path):
    """Beta trains in all rounds; only its first reply arrives."""

    class Losing(InProcessGrid):
        def _answer(self, message):
            reply, instruction = super()._answer(message), Instruction.of(message)
            trained = message.metadata.message_type == MessageType.TRAIN
            if trained and instruction.round > 1 and config_of(reply)["name"] == "beta":
                return make_reply(message, {"name": "beta", "problem": "the reply was lost"})
            return reply

    values = split_values | {"rounds": 4, "min-nodes": 2, "state-path": str(tmp_path / "state")}
    nodes = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    journal = run_in_process(values, tmp_path / "state", 3, Losing(values, nodes))
    rounds = [e for e in journal.events if e["event"] == "round"]
    assert [e["round"] for e in rounds if "beta" in e["participants"]] == [1]
    losses = {
        e["round"]: e["loss"]
        for e in journal.events
        if e["event"] == "evaluate" and (e["client"], e["model"]) == ("beta", "personalised")
    }
    assert losses == dict.fromkeys((1, 2, 3, 4), pytest.approx(losses[1], abs=1e-6))
    (file,) = (tmp_path / "state").glob("*/beta/adapters/personalised/adapter_model.safetensors")
    kept = load_file(file)
    assert all(torch.equal(kept[name], journal.kept["beta"][name]) for name in kept)


def test_nobody_waits_for_a_client_that_has_refused_its_round(split_values, tmp_path):
    """Gamma refuses; if the others waited for it to join, they would exceed round-timeout."""

    class Polled(InProcessGrid):
        pull_interval = 0.01

        def _ask(self, messages):
            for message in messages:
                threading.Thread(target=super()._ask, args=[[message]]).start()

        def _answer(self, message):
            if (
                message.metadata.message_type == MessageType.TRAIN
                and message.metadata.dst_node_id == 3
            ):
                return make_reply(message, {"name": "gamma", "problem": "my policy refuses it"})
            return super()._answer(message)

    values = split_values | {"split.schedule": "client-batch", "rounds": 1, "min-nodes": 2}
    values |= {
        "train.local-steps": 1,
        "split.join-timeout": 600.0,
        "round-timeout": 60.0,
        "state-path": str(tmp_path),
    }
    nodes = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    journal = run_in_process(values, tmp_path, 3, Polled(values, nodes, together=True))
    (event,) = [e for e in journal.events if e["event"] == "round"]
    assert event["participants"] == ["alpha", "beta"]


def test_an_embedding_and_a_head_alone_have_nothing_to_train(split_values, tmp_path):
    """In FedBERT's split, all adapters on attention are at the server."""
    cut = {"split.head-blocks": 0, "split.tail-blocks": 0, "rounds": 1}
    journal = run(split_values | cut, tmp_path)
    losses = {
        (e["client"], e["model"]): e["loss"] for e in journal.events if e["event"] == "evaluate"
    }
    for client in ("alpha", "beta", "gamma"):
        assert losses[client, "global"] < losses[client, "base"]
        assert (client, "personalised") in losses


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split.head-blocks": 2, "split.tail-blocks": 2}, "block"),
        ({"adapter.targets": "no_such_module"}, "adapter.targets"),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused(split_values, tmp_path, change, reason):
    with pytest.raises(BaseModelError, match=reason):
        run(split_values | change, tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split.average-every": 5}, "split.average-every"),
        ({"train.batch-size": 64}, "split.activation-budget"),
        ({"evaluate.generate": True, "evaluate.batch-size": 16}, "evaluate.max-new-tokens"),
        (
            {"adapter.kind": "prefix", "split.activation-budget": 1700},
            r"train.batch-size × \(adapter.prefix-length \+ data.max-length\) = 1856",
        ),
        ({"split.listen": "nowhere"}, "must be an address and a port"),
        ({"split.listen": "0.0.0.0:8900"}, "split.advertise"),
        ({"split.body-hosts": "10.0.0.6:9100"}, "split.body-key is needed"),
        ({"split.advertise": "host:99999"}, "must be an address and a port"),
        ({"split.advertise": "https://host:8900"}, "must be an address and a port"),
        ({"split.advertise": "fd00::1:8900"}, "must be an address and a port"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(split_values, change, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run_config(split_values | change)


def test_tickets_do_not_travel_in_clear_text(split_values, tmp_path):
    class Unencrypted(InProcessGrid):
        _insecure = True  # as Flower's grid says of its connection

    nodes = {1: {"partition-id": 0, "num-partitions": 3}}
    advertised = split_values | {"min-nodes": 1, "split.advertise": "192.0.2.1:8900"}
    with pytest.raises(RefusedError, match="not encrypted"):
        run_in_process(advertised, tmp_path, 1, Unencrypted(advertised, nodes))


def test_a_port_in_use_is_an_error_that_names_the_setting(split_values, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=r"split\.listen"):
            run(split_values | {"split.listen": address}, tmp_path)


@pytest.mark.parametrize(
    ("number", "clients", "is_known", "reasons"),
    [
        (1, 3, True, {"alpha": "its base model is not the run's"}),
        (2, 3, True, {"beta": "its base model is not the run's"}),
        (2, 3, False, {"beta": "its base model is not the run's"}),
        (2, 2, False, dict.fromkeys(("alpha", "beta"), "the clients' base models differ")),
    ],
)
def test_a_client_with_another_block_is_refused_by_name(
    split_values, tmp_path, deep_checkpoint, number, clients, is_known, reasons
):
    """Its first block differs; the server's blocks are equal.

    If the server lacks that block, clients are compared with each other; two have no majority.
    """
    swapped = tmp_path / "swapped"
    shutil.copytree(deep_checkpoint, swapped)
    tensors = load_file(swapped / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors["model.layers.3.mlp.down_proj.weight"].clone()
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})

    class Odd(InProcessGrid):
        """Gives one client a different checkpoint."""

        def send_and_receive(self, messages, *, timeout=None):
            replies = []
            for message in messages:
                if message.metadata.dst_node_id == number:
                    other = InProcessGrid(values | {"model.name": str(swapped)}, self._nodes)
                    replies += other.send_and_receive([message])
                else:
                    replies += super().send_and_receive([message])
            return replies

    values = split_values | {"state-path": str(tmp_path / "state"), "min-nodes": clients}
    nodes = {i + 1: {"partition-id": i, "num-partitions": clients} for i in range(clients)}
    lines = "".join(rf"\n  {who}: [^\n]*{why}[^\n]*{name}[^\n]*" for who, why in reasons.items())
    with pytest.raises(RefusedError, match=f"can't start:{lines}$"):
        unknown = [] if is_known else [name]
        start(values, Odd(values, nodes), MemoryJournal(), unknown=unknown)


@pytest.mark.slow
def test_progress_within_a_round_is_shown(split_values, tmp_path, monkeypatch):
    class Threaded(InProcessGrid):
        """A grid that is polled while the clients work, like Flower's grids."""

        pull_interval = 0.01

        def _ask(self, messages):
            if messages[0].metadata.message_type != "train":
                super()._ask(messages)
            else:
                threading.Thread(target=super()._ask, args=[messages]).start()

    monkeypatch.setattr(journals, "_REFRESH_SECONDS", 0.0)
    values = split_values | {"state-path": str(tmp_path), "rounds": 1, "train.local-steps": 20}
    nodes = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    shown = run_in_process(values, tmp_path, 3, Threaded(values, nodes)).shown
    lanes = [lane for status in shown for lane in status.lanes if status.phase == "training"]
    assert {lane.client for lane in lanes} == {"alpha", "beta", "gamma"}
    for client in ("alpha", "beta", "gamma"):
        steps = [lane.steps for lane in lanes if lane.client == client]
        assert steps == sorted(steps) and len(set(steps)) > 2
    assert all(lane.planned == 20 for lane in lanes if lane.steps > 0)
    assert max(lane.tokens for lane in lanes) > 0


def is_of_a_lane(thread: str) -> bool:
    return "lane" in thread or "compute" in thread or "serve" in thread


def test_no_thread_or_lane_outlives_a_run(split_values, tmp_path):
    before = set(threading.enumerate())
    run(split_values | {"rounds": 1, "train.local-steps": 1}, tmp_path)

    def left():
        return [t.name for t in set(threading.enumerate()) - before if is_of_a_lane(t.name)]

    wait_until(lambda: not left(), seen=left)
