"""A resumed run equals one that was never stopped, and refuses what would make it differ."""

import json
from functools import partial

import pytest

from federation.run_config import ConfigError, parse_run_config
from federation.run_folder import check_resumable, checkpoint_files
from server_app.checkpoint import check_base_model, load_run_checkpoint
from server_app.main import open_directory
from strategies.participants import TooFewClientsError
from tests.marks import nightly
from tests.server_app.runs import Altered, events, final, folders, newest, run, serve
from tests.split.server.test_stages import make_key, stage
from tests.strategies.grids import same


def drop_beta(replies):
    return [reply for reply in replies if reply.content["config"]["name"] != "beta"]


LOSING_BETA = partial(Altered, about=("train", 2), change=drop_beta)


@pytest.fixture
def here(tmp_path):
    return folders(tmp_path / "a")


@pytest.fixture
def there(tmp_path):
    return folders(tmp_path / "b")


@pytest.fixture
def split(values, deep_checkpoint):
    """Settings of a split run in which one of three clients may be missing."""
    split = {"strategy": "fl-glm", "model.name": str(deep_checkpoint), "min-nodes": 2}
    return values | split | {"train.local-steps": 2, "rounds": 2}


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
    values, here, there, deep_checkpoint, strategy, adapter, optimizer_state, stop
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
    unbroken = run(values | here)
    broken = run(values | there, stop_after=stop)
    assert run(values | there | {"resume": str(broken)}) == broken
    assert same(final(unbroken), final(broken))
    assert events(unbroken) == events(broken)


@pytest.mark.slow
def test_a_lost_reply_does_not_change_a_resumed_run(split, tmp_path, here):
    """Beta's head and tail of round 2 have no body, so those of round 1 are evaluated."""
    split |= {"split.schedule": "hierarchical", "rounds": 3}
    unbroken = run(split | here, kind=LOSING_BETA)
    evaluated = [e for e in events(unbroken) if e["event"] == "evaluate" and e["round"] == 2]
    assert ("beta", "personalised") in {(e["client"], e["model"]) for e in evaluated}
    # In the latter run, beta misses only the repetition of the interrupted round, so the adapter
    # trained before belongs to no average and no body.
    for name, stop in (
        ("b", {"stop_after": (2, False), "kind": LOSING_BETA}),
        ("c", {"stop_before": 2}),
    ):
        there = split | folders(tmp_path / name)
        broken = run(there, **stop)
        run(there | {"resume": str(broken)}, kind=LOSING_BETA)
        assert same(final(unbroken), final(broken))
        assert events(unbroken) == events(broken)
        assert not list(broken.rglob(".trained"))


@pytest.mark.nightly
def test_a_run_that_lost_a_stage_resumes_with_another(split, tmp_path, here, there):
    """It ends with the stage's address, and is then equal to a run without stages."""
    unbroken, key = run(split | here), make_key(tmp_path)
    there |= {"split.body-key": str(key)}
    with stage(key) as (kept, _), stage(key) as (lost, process), stage(key) as (new, _):

        def kill(replies):  # before the second round
            process.kill()
            process.wait()
            return replies

        first = split | there | {"split.body-hosts": f"{kept},{lost}"}
        with pytest.raises(TooFewClientsError, match=f"the stage at {lost} is lost"):
            run(first, kind=partial(Altered, about=("evaluate", 1), change=kill))
        broken = newest(there)
        run(split | there | {"split.body-hosts": f"{kept},{new}", "resume": str(broken)})
    assert same(final(unbroken), final(broken))


@pytest.mark.slow
def test_a_finished_run_can_have_more_rounds(values, here, there):
    directory = run(values | here | {"rounds": 2})
    run(values | here | {"rounds": 3, "resume": str(directory)})
    trained = [e for e in events(directory) if e["event"] == "train" and e["round"] == 3]
    assert len(trained) == 3
    assert all(event["penalty"] > 0 for event in trained)
    kept = [file.stem for file in checkpoint_files(directory)]
    assert kept == ["round-0002", "round-0003"]
    # Round 3 needs J at the adapter of round 2, which the finished run didn't compute.
    assert same(final(directory), final(run(values | there | {"rounds": 3})))


@pytest.mark.slow
def test_an_evaluation_with_too_few_replies_is_repeated(values, tmp_path, here, there):
    values |= {"strategy": "fedjudge-base", "rounds": 2}
    unbroken = run(values | here)
    silent = partial(Altered, about=("evaluate", 2), change=lambda replies: replies[:1])
    with pytest.raises(TooFewClientsError, match=r"evaluation after round 2: 1 valid replies"):
        run(values | there, kind=silent)
    broken = newest(there)
    run(values | there | {"resume": str(broken)})
    assert events(unbroken) == events(broken)
    assert len(list((tmp_path / "b-state").glob("*/*/adapters/global"))) == 3


def test_another_config_is_refused_and_missing_keys_had_defaults(values, here):
    values |= here | {"train.local-steps": 1, "rounds": 2}
    directory = run(values, stop_after=(1, True))
    file = directory / "config.json"
    older = json.loads(file.read_text())
    del older["fedprox.mu"], older["split.share-cap"], older["adapter.kind"]
    file.write_text(json.dumps(older))
    before = sorted(p.name for p in directory.rglob("*"))
    for change, reason in (
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"resume": "/nowhere"}, "is not a folder"),
        ({"train.schedule": "cosine"}, "train.schedule was 'constant' and is 'cosine'"),
        ({"adapter.kind": "prefix"}, r"adapter\.kind was 'lora' and is 'prefix'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(values | {"resume": str(directory)} | change)
        assert sorted(p.name for p in directory.rglob("*")) == before
    assert run(values | {"resume": str(directory)}) == directory


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


def test_a_damaged_file_is_named(values, here):
    values |= here | {"train.local-steps": 1, "rounds": 2}
    directory = run(values, stop_after=(1, True))
    (directory / "base-model.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"base-model\.json can't be read"):
        check_base_model(directory, {})
    file = directory / "checkpoints" / "round-0001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"round-0001\.safetensors can't be read"):
        load_run_checkpoint(directory)


def test_two_runs_of_one_second_have_folders_of_their_own(values, here):
    assert len({open_directory(parse_run_config(values | here)) for _ in range(3)}) == 3


def test_the_coordinator_finds_the_names_of_modules_for_all(values, tmp_path, here):
    """A resumed run has the same names, although its config need not list them."""
    values |= {"strategy": "fedjudge-base", "adapter.targets": r".*\.1\..*\.[qv]_proj", "rounds": 1}
    directory = serve(values | here)
    (state,) = (tmp_path / "a-state").glob("*/alpha")
    names = ["1.self_attn.q_proj", "1.self_attn.v_proj"]
    for folder in (directory, state):
        config = json.loads((folder / "config.json").read_text())
        assert config["adapter.targets"] == ",".join(names)
        exported = json.loads((folder / "adapters/global/adapter_config.json").read_text())
        assert sorted(exported["target_modules"]) == names
    values |= here | {"resume": str(directory)}
    serve(values | {"rounds": 2})
    with pytest.raises(ConfigError, match=r"adapter\.targets was '1\.self_attn\.q_proj"):
        serve(values | {"rounds": 3, "adapter.targets": "all-linear"})
