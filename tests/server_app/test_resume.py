"""A resumed run equals one that was never stopped, and no stop leaves a damaged file."""

import json
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from chambers.in_process import InProcessGrid
from federation.messages import to_arrays
from federation.run_config import ConfigError, parse_run_config
from federation.run_folder import check_resumable, checkpoint_files
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import fingerprint
from finetuning.model.locating import locate
from finetuning.randomness import derive_seed
from server_app.checkpoint import check_base_model, load_checkpoint
from server_app.main import STRATEGIES, checkpoint_of, open_directory
from server_app.main import main as serve_run
from server_app.results import Results
from strategies.journal import Progress
from strategies.participants import TooFewClientsError
from tests.marks import nightly
from tests.split.server.test_stages import make_key, stage

NODES = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}


class PowerFailureError(Exception):
    """Simulates that the machine stops."""


class Losing(InProcessGrid):
    """Drops beta's reply in the second training round."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages))
        about = messages[0].metadata.message_type, messages[0].content["config"]["round"]
        if about != ("train", 2):
            return replies
        return [reply for reply in replies if reply.content["config"]["name"] != "beta"]


def run(
    values: dict,
    stop_after: tuple[int, bool] | None = None,
    kind: type = InProcessGrid,
    stop_before: int | None = None,
) -> Path:
    """Run as the ServerApp does, until the machine stops after or before a checkpoint."""
    config = parse_run_config(values)
    base = locate(config.model.name)
    state, peft_config = initial_adapter(
        config.model.name, config.adapter, derive_seed("adapter", config.seed)
    )
    directory = open_directory(config)
    checkpoint = checkpoint_of(config, directory)
    results = Results(directory, config, base, peft_config)
    progress = Progress("test")
    if checkpoint is not None:
        results.rewind_to(checkpoint)
        progress, state = checkpoint.progress, checkpoint.state
    results.describe(fingerprint(base))
    write = results.checkpoint

    def stopping(progress, state):
        if progress.finished_rounds == stop_before:
            raise PowerFailureError
        write(progress, state)
        if (progress.finished_rounds, progress.evaluated) == stop_after:
            raise PowerFailureError

    results.checkpoint = stopping
    strategy = STRATEGIES[config.strategy](config, fingerprint(base), progress, results)
    try:
        strategy.start(kind(values, NODES), to_arrays(state), config.rounds, timeout=0.0)
    except PowerFailureError:
        pass
    finally:
        results.close()
    return directory


def final(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        f"{file.parent.name}.{name}": tensor
        for file in sorted((directory / "adapters").rglob("adapter_model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def events(directory: Path) -> list[dict]:
    """Return the events without fields that depend on timing, such as a lane's bytes."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "bytes"))}
        for line in lines
    ]


@pytest.mark.parametrize(
    ("strategy", "adapter", "optimizer_state", "stop"),
    [
        pytest.param("serial", "lora", "keep", (2, True), marks=pytest.mark.slow),
        pytest.param("hierarchical", "lora", "keep", (2, False), marks=pytest.mark.slow),
        *(
            nightly(*case)
            for case in (
                ("fedjudge-cl", "lora", "reset", (0, True)),
                ("fedjudge-cl", "prefix", "keep", (2, False)),
                ("fedjudge-cl", "lora", "reset", (2, False)),
                ("fedjudge-cl", "lora", "keep", (2, True)),
                ("hierarchical", "prefix", "keep", (2, True)),
            )
        ),
    ],
    ids=str,
)
def test_resumed_equals_unbroken(
    values, tmp_path, deep_checkpoint, strategy, adapter, optimizer_state, stop
):
    if strategy in {"serial", "hierarchical"}:
        values |= {"model.name": str(deep_checkpoint), "split.schedule": strategy}
        strategy = "fl-glm"
    values = values | {
        "strategy": strategy,
        "rounds": 3,
        "adapter.kind": adapter,
        "adapter.prefix-length": 8,
        "train.optimizer-state": optimizer_state,
        "train.schedule": "cosine",
        "train.local-steps": 2,
    }
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(values | here)
    broken = run(values | there, stop)
    assert run(values | there | {"resume": str(broken)}) == broken
    one, other = final(unbroken), final(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert events(unbroken) == events(broken)


@pytest.mark.slow
def test_resumed_equals_unbroken_after_a_reply_was_lost(values, tmp_path, deep_checkpoint):
    """Beta's head and tail of round 2 have no body, so those of round 1 are evaluated."""
    values |= {"strategy": "fl-glm", "model.name": str(deep_checkpoint), "min-nodes": 2}
    values |= {"split.schedule": "hierarchical", "rounds": 3, "train.local-steps": 2}
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(values | here, kind=Losing)
    broken = run(values | there, (2, False), kind=Losing)
    run(values | there | {"resume": str(broken)})
    assert events(unbroken) == events(broken)
    evaluated = [e for e in events(unbroken) if e["event"] == "evaluate" and e["round"] == 2]
    assert ("beta", "personalised") in {(e["client"], e["model"]) for e in evaluated}


@pytest.mark.slow
def test_a_client_that_misses_a_repeated_round_keeps_its_last_adapter(
    values, tmp_path, deep_checkpoint
):
    """The adapter trained in the interrupted round belongs to no average and no body."""
    values |= {"strategy": "fl-glm", "model.name": str(deep_checkpoint), "min-nodes": 2}
    values |= {"split.schedule": "hierarchical", "rounds": 2, "train.local-steps": 2}
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(values | here, kind=Losing)
    broken = run(values | there, stop_before=2)
    run(values | there | {"resume": str(broken)}, kind=Losing)
    one, other = final(unbroken), final(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert events(unbroken) == events(broken)
    assert not list(broken.rglob(".trained"))


@pytest.mark.nightly
def test_a_run_that_lost_a_stage_resumes_with_another(values, tmp_path, deep_checkpoint):
    """It ends with the stage's address, and is then equal to a run without stages."""
    values |= {"strategy": "fl-glm", "model.name": str(deep_checkpoint), "min-nodes": 2}
    values |= {"rounds": 2, "train.local-steps": 2, "evaluate.generate": False}
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken, key = run(values | here), make_key(tmp_path)
    there |= {"split.body-key": str(key)}
    with stage(key) as (kept, _), stage(key) as (lost, process), stage(key) as (new, _):

        class Killing(InProcessGrid):
            """Kills a stage before the second round."""

            def send_and_receive(self, messages, *, timeout=None):
                messages = list(messages)
                about = messages[0].metadata.message_type, messages[0].content["config"]["round"]
                if about == ("train", 2):
                    process.kill()
                    process.wait()
                return super().send_and_receive(messages)

        with pytest.raises(TooFewClientsError, match=f"the stage at {lost} is lost"):
            run(values | there | {"split.body-hosts": f"{kept},{lost}"}, kind=Killing)
        (broken,) = (tmp_path / "b").iterdir()
        run(values | there | {"split.body-hosts": f"{kept},{new}", "resume": str(broken)})
    one, other = final(unbroken), final(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_finished_run_can_have_more_rounds(values, tmp_path):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path / "state")}
    directory = run(values | {"rounds": 2})
    run(values | {"rounds": 3, "resume": str(directory)})
    trained = [e for e in events(directory) if e["event"] == "train" and e["round"] == 3]
    assert len(trained) == 3
    assert all(event["penalty"] > 0 for event in trained)
    kept = [file.stem for file in checkpoint_files(directory)]
    assert kept == ["round-0002", "round-0003"]
    # Round 3 needs J at the adapter of round 2, which the finished run didn't compute.
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    one, other = final(directory), final(run(values | there | {"rounds": 3}))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_last_evaluation_with_too_few_replies_can_be_repeated(values, tmp_path):
    class Silent(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = list(super().send_and_receive(messages))
            about = messages[0].metadata.message_type, messages[0].content["config"].get("round")
            return replies[:1] if about == ("evaluate", 2) else replies

    values |= {"strategy": "fedjudge-base", "rounds": 2}
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(values | here)
    with pytest.raises(TooFewClientsError, match=r"evaluation after round 2: 1 valid replies"):
        run(values | there, kind=Silent)
    (broken,) = (tmp_path / "b").iterdir()
    run(values | there | {"resume": str(broken)})
    assert events(unbroken) == events(broken)
    assert len(list((tmp_path / "b-state").glob("*/*/adapters/global"))) == 3


def test_a_resumption_with_another_config_is_refused(values, tmp_path):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path / "state")}
    values |= {"train.local-steps": 1}
    directory = run(values | {"rounds": 2}, stop_after=(1, True))
    before = sorted(p.name for p in directory.rglob("*"))
    for change, reason in (
        ({"train.learning-rate": 1.0}, r"train.learning-rate was 0.005 and is 1.0"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"resume": "/nowhere"}, "is not a folder"),
        ({"train.schedule": "cosine"}, "train.schedule was 'constant' and is 'cosine'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(values | {"rounds": 2, "resume": str(directory)} | change)
        assert sorted(p.name for p in directory.rglob("*")) == before


@pytest.mark.parametrize("key", ["split.share-cap", "split.activation-budget"])
def test_what_changes_stacks_must_stay_only_with_client_batch(values, tmp_path, key):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "round-0001.safetensors").touch()

    def resume(schedule):
        before = parse_run_config(values | {"strategy": "fl-glm", "split.schedule": schedule})
        (tmp_path / "config.json").write_text(json.dumps(before.flat()))
        after = before.flat() | {key: before.flat()[key] * 2}
        check_resumable(tmp_path, parse_run_config(after))

    resume("serial")
    with pytest.raises(ConfigError, match=f"{key} was"):
        resume("client-batch")


def test_a_key_that_an_older_run_lacks_had_its_default(values, tmp_path):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path / "state")}
    values |= {"train.local-steps": 1}
    directory = run(values | {"rounds": 2}, stop_after=(1, True))
    file = directory / "config.json"
    older = json.loads(file.read_text())
    del older["fedprox.mu"], older["split.share-cap"], older["adapter.kind"]
    file.write_text(json.dumps(older))
    prefixes = {"adapter.kind": "prefix", "adapter.prefix-length": 8}
    with pytest.raises(ConfigError, match=r"adapter\.kind was 'lora' and is 'prefix'"):
        run(values | {"rounds": 2, "resume": str(directory)} | prefixes)
    assert run(values | {"rounds": 2, "resume": str(directory)}) == directory


def test_a_damaged_file_is_named(values, tmp_path):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path / "state")}
    values |= {"train.local-steps": 1}
    directory = run(values | {"rounds": 2}, stop_after=(1, True))
    (directory / "base-model.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"base-model\.json can't be read"):
        check_base_model(directory, {})
    file = directory / "checkpoints" / "round-0001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"round-0001\.safetensors can't be read"):
        load_checkpoint(directory)


def test_two_runs_of_one_second_have_folders_of_their_own(values, tmp_path):
    values |= {"output-dir": str(tmp_path / "runs")}
    folders = {open_directory(parse_run_config(values)) for _ in range(3)}
    assert len(folders) == 3


def test_the_coordinator_finds_the_names_of_modules_for_all(values, tmp_path):
    """A resumed run has the same names, although its config need not list them."""
    values |= {"strategy": "fedjudge-base", "adapter.targets": r".*\.1\..*\.[qv]_proj", "rounds": 1}
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path / "state")}

    def serve(**changes):
        run_config = values | changes
        context = Context(1, 0, {}, RecordDict(), run_config)
        serve_run(InProcessGrid(run_config, NODES), context)
        return next((tmp_path / "runs").iterdir())

    directory = serve()
    (state,) = (tmp_path / "state").glob("*/alpha")
    names = ["1.self_attn.q_proj", "1.self_attn.v_proj"]
    for folder in (directory, state):
        config = json.loads((folder / "config.json").read_text())
        assert config["adapter.targets"] == ",".join(names)
        exported = json.loads((folder / "adapters/global/adapter_config.json").read_text())
        assert sorted(exported["target_modules"]) == names
    serve(resume=str(directory), rounds=2)
    with pytest.raises(ConfigError, match=r"adapter\.targets was '1\.self_attn\.q_proj"):
        serve(resume=str(directory), rounds=3, **{"adapter.targets": "all-linear"})
