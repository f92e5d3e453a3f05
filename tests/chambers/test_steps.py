"""The numbers of steps that ``chambers train`` says, and chooses for a user's own rows."""

from hypothesis import given
from hypothesis import strategies as st

from chambers.__main__ import main
from chambers.app_folder import presets
from chambers.run_plan import describe_time
from chambers.settings import read_settings
from chambers.steps import describe_steps, read_clients, suited
from federation.run_config import parse_run_config
from finetuning.adapters.adapted_modules import with_names
from finetuning.adapters.adapter import initial_adapter
from finetuning.data.batching import steps_per_round
from tests.chambers.conftest import execute


def config_for(rows):
    settings = read_settings(["own-rows"])
    return parse_run_config(settings | suited(rows, settings["train.batch-size"]))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_a_typical_client_takes_enough_steps_and_sees_each_row(sizes):
    rows = {f"client {number}": size for number, size in enumerate(sizes)}
    config = config_for(rows)
    typical = sorted(sizes)[(len(sizes) - 1) // 2]
    assert steps_per_round(typical, config.train) >= 8
    assert config.train.local_steps == 0
    # Another pass over the rows is only for clients with few of them.
    assert config.train.epochs == 1 or typical < 8 * 4


def test_steps_are_described_and_few_are_named(values):
    config = parse_run_config(values | {"train.learning-rate": 5e-4})
    rows = {client.name: len(client.train) for client in read_clients(config, 3)}
    assert rows == {"alpha": 24, "beta": 12, "gamma": 8}
    *lines, warning = describe_steps(rows, config)
    assert lines == [
        "alpha: 6 steps per round of up to 4 rows, 18 in all",
        "beta: 3 steps per round of up to 4 rows, 9 in all",
        "gamma: 2 steps per round of up to 4 rows, 6 in all",
    ]
    assert warning.startswith("warning: 6 steps at train.learning-rate = 0.0005 hardly change")
    enough = describe_steps(dict.fromkeys("abcde", 400), config_for({"a": 400}))
    assert enough == ["a, b, c and 2 more: 50 steps per round of up to 8 rows, 150 in all"]


def test_masked_sums_of_the_demonstration_hide_answers(capfd, checkpoint):
    """Its preset would show them, and two clients are too few."""
    words = ["train", "--plan", "demo", f"model.name={checkpoint}", "sums.enabled=true"]
    words += ["evaluate.generate=false", "adapter.targets=q_proj", "data.max-length=128"]
    assert main(words) == 0
    assert "evaluate.show-answers = 0, since sums.enabled = true" in capfd.readouterr().err
    assert main([*words, "--clients", "2"]) == 2
    assert "needs min-nodes of at least 3" in capfd.readouterr().err


def test_a_plan_is_printed_and_nothing_is_trained(
    capsys, checkpoint, deep_checkpoint, client_folders, tmp_path
):
    folders = [f"output-dir={tmp_path / 'runs'}", f"state-path={tmp_path / 'state'}"]
    own = (f"model.name={checkpoint}", f"data.path={client_folders}")
    memory, *clients, seconds, kept, whole_run, bytes_sent = execute(
        capsys, "train", "--plan", *own, *folders, "keep-rounds=all"
    ).splitlines()
    assert memory.startswith("memory: about 0.4 GiB (context 0.4, weights 0.0, activations 0.0)")
    assert [line.split(" with ")[0] for line in clients] == [
        "alpha: 24 training rows",
        "beta: 12 training rows",
        "gamma: 8 training rows",
    ]
    assert seconds.startswith("time: about ")
    config = parse_run_config(read_settings(["own-rows", *own]))
    line = describe_time(config, 3, read_clients(config, 3))
    tokens = sum(int(client.split()[5]) for client in clients) / (24 + 12 + 8)
    assert line.startswith("time: about ") and f"{tokens:.0f} tokens on average" in line
    settings = with_names(checkpoint, config_for({"alpha": 24}).adapter)
    weights = sum(v.numel() for v in initial_adapter(str(checkpoint), settings, 0)[0].values())
    assert f" {4 * weights / 2**20:.1f} MiB (its adapter)" in bytes_sent
    assert kept == f"checkpoints: {config.rounds * 4 * weights / 2**20:.1f} MiB (keep-rounds = all)"
    there_and_back = 2 * config.rounds * 3 * 4 * weights
    assert whole_run.endswith(f"to and from all clients: {there_and_back / 2**30:.2f} GiB")
    split = (f"model.name={deep_checkpoint}", own[1], "strategy=fl-glm")
    memory, *_, bytes_sent = execute(capsys, "train", "--plan", *split, *folders).splitlines()
    assert "of hidden states" in bytes_sent and " for the server" in memory
    assert not list(tmp_path.iterdir())


def test_presets_are_listed_with_what_they_are(capsys):
    lines = execute(capsys, "train", "--presets").splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines)
    assert listed.keys() == presets().keys() and all(map(len, listed.values()))
