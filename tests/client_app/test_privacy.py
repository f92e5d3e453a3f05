"""Differential privacy at a site: the content of replies, the privacy spent, and refusals."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from chambers.in_process import InProcessGrid
from client_app import fedjudge
from client_app.privacy_account import PrivateSteps, epsilon
from federation.messages import ARRAYS, AUDIT, CONFIG, METRICS, SIZE, to_arrays
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.errors import DeadlineError
from finetuning.model.base_model import load_base_model
from finetuning.model.fingerprint import fingerprint
from finetuning.model.locating import locate
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import Noise, PrivateGradients, poisson_steps
from finetuning.whole_model import WholeModel
from server_app.report import write_report
from strategies.fedjudge import FedJudgeBase
from strategies.journal import Progress
from strategies.participants import RefusedError, TooFewClientsError
from tests.chambers.site.deployment import documented
from tests.finetuning.data.templates import THINKING
from tests.in_process import MemoryJournal
from tests.strategies.grids import same, start

CLIENTS = ("alpha", "beta", "gamma")


class Sites(InProcessGrid):
    """Clients with separate files, some of which have a policy; their replies are stored."""

    def __init__(self, values: dict, folders: Path, policies: dict[str, Path]) -> None:
        nodes: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(CLIENTS, start=1):
            nodes[number] = {"name": name, "data-path": str(folders / name)}
            if name in policies:
                nodes[number]["policy"] = str(policies[name])
        super().__init__(values, nodes)
        self.replies: list[Any] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(self.change(list(messages))))
        self.replies += replies
        return replies

    def change(self, messages: list[Any]) -> list[Any]:
        return messages

    def of(self, node: int, kind: str) -> list[Any]:
        return [
            reply.content
            for reply in self.replies
            if reply.metadata.src_node_id == node and reply.metadata.message_type == kind
        ]


@pytest.fixture
def settings(values: dict, tmp_path: Path) -> dict:
    changes = {"strategy": "fedjudge-base", "rounds": 2, "data.path": "", "state-path": ""}
    return values | changes | {"state-path": str(tmp_path / "state")}


@pytest.fixture
def policy(tmp_path: Path, checkpoint: Path):
    """Return a function that writes a policy with differential privacy."""

    def write(epsilon: float, name: str = "site") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        file = folder / "policy.toml"
        file.write_text(
            f'paths = ["{checkpoint}", "{tmp_path}"]\n'
            f'audit-log = "{folder / "audit.jsonl"}"\n'
            "[split]\nallowed = false\n"
            f"[privacy]\nepsilon = {epsilon}\ndelta = 1e-3\nnoise-multiplier = 2.0\n"
            f'account = "{folder / "privacy.jsonl"}"\n'
        )
        return file

    return write


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_only_what_the_account_covers_leaves(settings, client_folders, policy, tmp_path):
    file = policy(20.0)
    grid, journal = Sites(settings, client_folders, {"alpha": file}), MemoryJournal()
    start(settings, grid, journal)
    (query,) = grid.of(1, "query")
    assert dict(query[METRICS]) == {SIZE: 24}
    for reply in [*grid.of(1, "train"), *grid.of(1, "evaluate")]:
        assert set(reply) <= {ARRAYS, CONFIG, METRICS, AUDIT}
        assert dict(reply[METRICS]) == {SIZE: 24}
        assert set(reply[CONFIG]) == {"name", "base", "withheld"}
    assert all(ARRAYS in reply for reply in grid.of(1, "train"))
    assert not any(ARRAYS in reply for reply in grid.of(1, "evaluate"))
    assert len(grid.of(1, "train")) == 2 and len(grid.of(1, "evaluate")) == 3
    assert all("loss" in reply[METRICS] for reply in grid.of(2, "train"))

    # Two rounds of six steps, each of which samples a row with probability 4/24, are recorded.
    account, audit = lines(file.with_name("privacy.jsonl")), lines(file.with_name("audit.jsonl"))
    assert [(e["round"], e["steps"], e["noise-multiplier"]) for e in account] == [
        (1, 6, 2.0),
        (2, 6, 2.0),
    ]
    assert all(e["sampling-rate"] == pytest.approx(4 / 24) for e in account)
    spent = [e["epsilon"] for e in audit if e["event"] == "privacy"]
    assert spent == [
        pytest.approx(epsilon([PrivateSteps(4 / 24, 2.0, steps)], 1e-3)) for steps in (6, 12)
    ]

    # The coordinator's report says so.
    (tmp_path / "config.json").write_text(json.dumps({"rounds": 2}))
    events = [e for e in journal.events if e["event"] in ("train", "evaluate", "round")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    report = write_report(tmp_path).read_text()
    assert "metrics are not sent: the site&#39;s policy demands differential privacy" in report


def test_rows_that_are_no_examples_count_as_others_do(
    settings, client_folders, policy, tmp_path, monkeypatch
):
    """Account and noise don't reveal how many of the 48 rows are examples."""
    data, rounds, train = tmp_path / "data", [], fedjudge.train_round
    shutil.copytree(client_folders, data)
    # Their answers don't fit: the template's text around turns can't be shortened.
    turns = [{"role": "user", "content": ""}] * 60 + [{"role": "assistant", "content": "the"}]
    with (data / "alpha" / "train.jsonl").open("a") as file:
        file.write(f"{json.dumps({'messages': turns})}\n" * 24)

    def measuring(*, model: Any, parameters: Any, **others: Any) -> Any:
        if isinstance(model, PrivateGradients):
            assert len(others["examples"]) == 24
            noise = []
            for seed in (0, 1):
                model.accumulate([], seed=seed)
                noise.append(torch.cat([p.grad.flatten() for p in parameters.values()]))
            assert not torch.equal(*noise)
            rounds.append((others["local_round"], float(noise[0].std())))
        return train(model=model, parameters=parameters, **others)

    monkeypatch.setattr(fedjudge, "train_round", measuring)
    file = policy(20.0)
    own = file.read_text()
    file.write_text("min-rows = 48\nmax-steps = 11\n" + own)
    with pytest.raises(RefusedError, match=r"alpha.*steps = 12 \(max-steps = 11\)"):
        start(settings, Sites(settings, data, {"alpha": file}), MemoryJournal())
    file.write_text("min-rows = 48\nmax-steps = 12\n" + own)
    start(settings, Sites(settings, data, {"alpha": file}), MemoryJournal())
    for number, spent in enumerate(lines(file.with_name("privacy.jsonl"))):
        assert (spent["sampling-rate"], spent["steps"]) == (pytest.approx(4 / 48), 12)
        local_round, deviation = rounds[number]
        assert len(local_round.steps) == 12
        assert (local_round.first_step, local_round.total_steps) == (12 * number, 24)
        # σ · C = 2, divided by the 4 rows that a step has on average.
        assert deviation == pytest.approx(2 / 4, rel=0.15)
    assert len(rounds) == 2


def test_the_seed_does_not_determine_a_private_adapter(settings, client_folders, policy):
    file, kept = policy(30.0), []
    for _ in range(2):
        journal = MemoryJournal()
        one_round = settings | {"rounds": 1, "train.local-steps": 1}
        start(one_round, Sites(one_round, client_folders, {"alpha": file}), journal)
        kept.append(journal.kept)
    assert not any(torch.equal(kept[0]["alpha"][n], kept[1]["alpha"][n]) for n in kept[0]["alpha"])
    assert same(kept[0]["beta"], kept[1]["beta"])
    # The second run used the same rows, so it is charged to the same account.
    audit = lines(file.with_name("audit.jsonl"))
    first, second = (e["epsilon"] for e in audit if e["event"] == "privacy")
    assert second > first


def test_a_lost_account_is_written_again_from_the_audit_log(
    settings, client_folders, policy, tmp_path
):
    file, one_round = policy(30.0, "state"), settings | {"rounds": 1}
    _, _, restore = documented("Back up and restore")
    command = " && ".join(restore.splitlines()).replace("state", str(tmp_path / "state"))
    command = command.replace("audit.jsonl*", "audit.jsonl")  # there are no rotated files
    for _ in range(2):
        start(one_round, Sites(one_round, client_folders, {"alpha": file}), MemoryJournal())
        file.with_name("privacy.jsonl").unlink()
        with pytest.raises(RefusedError, match=re.escape(f"(docs/operations.md): {command}")):
            start(one_round, Sites(one_round, client_folders, {"alpha": file}), MemoryJournal())
        subprocess.run(["bash", "-ec", restore], cwd=tmp_path, check=True)
    audit = lines(file.with_name("audit.jsonl"))
    assert [e["epsilon"] for e in audit if e["event"] == "privacy"][1] == pytest.approx(
        epsilon([PrivateSteps(4 / 24, 2.0, 12)], 1e-3)
    )


def test_a_proximal_term_spends_no_more(settings, client_folders, policy):
    spent = []
    for name, changes in (("base", {}), ("prox", {"strategy": "fedprox", "fedprox.mu": 0.1})):
        changes |= {"rounds": 1, "train.local-steps": 2}
        file, own = policy(20.0, name), settings | changes
        grid, journal = Sites(own, client_folders, {"alpha": file}), MemoryJournal()
        start(own, grid, journal)
        assert set(grid.of(1, "train")[0][METRICS]) == {SIZE}
        audit = lines(file.with_name("audit.jsonl"))
        spent.append([e["epsilon"] for e in audit if e["event"] == "privacy"])
    assert spent[0] == spent[1] and len(spent[0]) == 1


def test_a_run_without_enough_epsilon_is_refused_at_its_start(settings, client_folders, policy):
    file, journal = policy(2.0), MemoryJournal()
    nine = settings | {"rounds": 9}
    with pytest.raises(RefusedError, match=r"alpha.*refuses 54 steps.*\d+ are left"):
        start(nine, Sites(nine, client_folders, {"alpha": file}), journal)
    assert not file.with_name("privacy.jsonl").exists()
    start(settings, Sites(settings, client_folders, {"alpha": file}), journal)
    assert len(lines(file.with_name("privacy.jsonl"))) == 2
    # If eight rounds are finished, ε suffices for the ninth.
    done = Progress("test", finished_rounds=8, evaluated=True)
    fingerprints = fingerprint(locate(settings["model.name"]))
    resumed = FedJudgeBase(parse_run_config(nine), fingerprints, done, journal)
    resumed.start(Sites(nine, client_folders, {"alpha": file}), to_arrays(journal.adapters[2]), 9)
    assert [e["round"] for e in lines(file.with_name("privacy.jsonl"))] == [1, 2, 9]


def test_a_round_that_fails_has_spent_its_epsilon(settings, client_folders, policy, monkeypatch):
    """If it is repeated, it spends no more, although another run has sent an adapter since."""
    file, one_round = policy(20.0), settings | {"rounds": 1}

    def fail(**_: Any) -> None:
        raise DeadlineError("raise round-timeout")

    with monkeypatch.context() as patched:
        patched.setattr(fedjudge, "train_round", fail)
        with pytest.raises(TooFewClientsError, match=r"alpha: .*round-timeout"):
            start(one_round, Sites(one_round, client_folders, {"alpha": file}), MemoryJournal())
    for lineage in ("other", "test"):
        grid = Sites(one_round, client_folders, {"alpha": file})
        start(one_round, grid, MemoryJournal(), lineage=lineage)
        spent = lines(file.with_name("privacy.jsonl"))
        assert [(e["run"], e["steps"]) for e in spent] == [("test", 6), ("other", 6)]


def test_what_cannot_be_computed_costs_no_epsilon(
    settings, client_folders, policy, checkpoint, tmp_path
):
    """OPT flattens the input of each MLP's second layer, so the gradients have no rows."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 1024}
    OPTForCausalLM(OPTConfig(**sizes)).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "opt")
    changes = {"model.name": str(tmp_path / "opt"), "adapter.targets": "q_proj,fc2"}
    file = policy(20.0)
    with pytest.raises(TooFewClientsError, match=r"alpha: .*can't be computed in .*fc2"):
        start(
            settings | changes,
            Sites(settings | changes, client_folders, {"alpha": file}),
            MemoryJournal(),
        )
    assert not file.with_name("privacy.jsonl").exists()


def test_held_out_rows_that_are_not_used_may_be_few(settings, client_folders, policy):
    file = policy(20.0)
    file.write_text("min-rows = 12\n" + file.read_text())
    settings |= {"rounds": 1}
    grid = Sites(settings, client_folders, {"alpha": file})
    start(settings, grid, MemoryJournal())
    assert all("problem" not in content[CONFIG] for content in grid.of(1, "evaluate"))
    assert grid.of(1, "evaluate")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "fl-glm"}, "hidden states"),
        ({"strategy": "fedjudge-cl", "continual.importance": "client"}, "importance"),
        ({"train.optimizer-state": "keep"}, "optimizer-state"),
        ({"model.quantization": "int8"}, "int8"),
        ({"rounds": 500}, "are left"),
    ],
)
def test_what_has_no_epsilon_is_refused_with_the_reason(
    settings, client_folders, policy, changes, reason
):
    grid = Sites(settings | changes, client_folders, {"alpha": policy(5.0)})
    with pytest.raises(RefusedError, match=rf"alpha.*{reason}"):
        # Avoid the coordinator's check of a split base model.
        start({**settings, **changes, "strategy": "fedjudge-base"}, grid, MemoryJournal())
    assert "problem" in grid.of(1, "query")[0][CONFIG]


def test_rows_that_a_chat_template_divides_are_refused(settings, policy, checkpoint, tmp_path):
    """A row with two answers would become two examples, but the unit of privacy is a row."""
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(checkpoint, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(model)
    turns = [{"role": r, "content": "the claim"} for r in ("user", "assistant")]
    for answers, name in enumerate(CLIENTS, start=1):
        (data / name).mkdir(parents=True)
        row = json.dumps({"messages": turns * answers}) + "\n"
        (data / name / "train.jsonl").write_text(row * 8)
    divided = settings | {"model.name": str(model)}
    grid = Sites(divided, data, {"alpha": policy(20.0, "one"), "beta": policy(20.0, "two")})
    with pytest.raises(RefusedError, match="several examples") as error:
        start(divided, grid, MemoryJournal())
    assert "beta" in str(error.value) and "alpha" not in str(error.value)


def test_a_run_without_any_importance_is_refused(settings, client_folders, policy):
    """With ``sample``, one client evaluates, and only that one would compute J."""
    sampled, journal = settings | {"sample": 0.34, "min-nodes": 1, "seed": 1}, MemoryJournal()
    untrained = sampled | {"rounds": 0}
    start(untrained, Sites(untrained, client_folders, {}), journal)
    (name,) = (e["client"] for e in journal.events if e["event"] == "evaluate")
    cl = sampled | {"strategy": "fedjudge-cl"}
    with pytest.raises(RefusedError, match="policies of all clients that evaluate withhold it"):
        start(cl, Sites(cl, client_folders, {name: policy(20.0)}), MemoryJournal())


def test_importance_neither_leaves_nor_steers_the_training(settings, client_folders, policy):
    """FedJudge-CL uses the other clients' importance, and messages can't demand this client's."""
    settings |= {"train.local-steps": 1}
    cl = settings | {"strategy": "fedjudge-cl"}
    grid, journal = Sites(cl, client_folders, {"alpha": policy(20.0)}), MemoryJournal()
    start(cl, grid, journal)
    first, wanted, final = (dict(reply[CONFIG]) for reply in grid.of(1, "evaluate"))
    assert "importance (privacy.epsilon" in wanted["problem"]
    assert "problem" not in first and "problem" not in final
    assert sum(e["event"] == "train" and e["client"] == "alpha" for e in journal.events) == 2

    class Demanding(Sites):
        def change(self, messages):
            for message in messages:
                if message.metadata.message_type == "train":
                    message.content[CONFIG]["importance"] = True
            return messages

    grid = Demanding(settings, client_folders, {"alpha": policy(20.0, "other")})
    with pytest.raises(TooFewClientsError, match=r"alpha: .*importance"):
        start(settings, grid, MemoryJournal())


def test_fedjudge_cl_is_refused_if_nobody_computes_importance(settings, client_folders, policy):
    cl = settings | {"strategy": "fedjudge-cl"}
    files = {name: policy(20.0, name) for name in CLIENTS}
    with pytest.raises(RefusedError, match='use strategy = "fedjudge-base"'):
        start(cl, Sites(cl, client_folders, files), MemoryJournal())
    assert not any(file.with_name("privacy.jsonl").exists() for file in files.values())


@pytest.mark.nightly
def test_membership_is_harder_to_tell_the_smaller_epsilon_is(checkpoint):
    """The model is overfitted; the attack guesses that rows with lower loss are members."""
    count, steps, rate = 24, 60, 0.5
    generator = torch.Generator().manual_seed(0)
    members, others = (
        [
            Example(
                tokens=torch.randint(2, 300, (12,), generator=generator),
                is_target=torch.arange(12) > 1,
                prompt_length=2,
                reference="",
                row=row,
            )
            for row in range(count)
        ]
        for _ in range(2)
    )
    success, spent = [], []
    for multiplier in (0.0, 1.0, 4.0):
        torch.manual_seed(0)
        base = load_base_model(ModelSettings(name=str(checkpoint))).model
        targets = "q_proj,k_proj,v_proj,o_proj,up_proj,down_proj,gate_proj"
        adapter = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets=targets)
        model = WholeModel(attach_adapter(base, adapter, None))
        parameters = trainable_parameters(model.peft_model)
        random = np.random.default_rng(0).bytes
        noise = Noise(multiplier, 1.0, rate * count)
        private = PrivateGradients(model, parameters, noise, lambda _, random=random: random)
        rows = poisson_steps(count, rate, steps, random)
        local_round = LocalRound(rows, 0, steps, 0, time.monotonic() + 600)
        train = TrainSettings(learning_rate=2e-2, batch_size=count, max_gradient_norm=0.0)
        train_round(private, parameters, members, 0, local_round, train)
        inside, outside = (
            torch.tensor([model.summed_losses([collate([row], 0)])[0] for row in part])
            for part in (members, others)
        )
        success.append(float((inside[:, None] < outside).double().mean()))
        spent.append(epsilon([PrivateSteps(rate, multiplier, steps)], 1e-2))
    assert spent[0] == float("inf") and spent[1] > 20 and spent[2] < 3
    # The probability that a member has a lower loss than another row; 0.5 is a guess.
    assert success[0] > 0.99
    assert success[0] - 0.1 > success[1] > success[2] + 0.1
    assert success[2] < 0.65
