"""A coordinator with a full disk, or with a ServerApp killed while writing a checkpoint."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from chambers.in_process import InProcessGrid
from chambers.run_status import read_run_state
from federation.run_config import ConfigError
from federation.run_folder import checkpoint_files, read_status
from finetuning.files import DiskFullError, remove_unfinished, remove_whole, replacing
from server_app import results
from tests.conftest import fill
from tests.server_app.runs import Altered, events, final, folders, newest, serve
from tests.strategies.grids import NODES, same

SECONDS = 60


def checkpoints(directory: Path) -> list[int]:
    """Return the rounds that have a checkpoint; fail if a checkpoint can't be read."""
    found = []
    for file in sorted((directory / "checkpoints").glob("round-*")):
        with safe_open(file, "pt") as content:
            found.append(json.loads(content.metadata()["checkpoint"])["finished_rounds"])
            for key in content.keys():  # noqa: SIM118
                content.get_tensor(key)
    return found


def unfinished(directory: Path) -> list[Path]:
    return [path for path in directory.rglob(".*") if path.name not in {".replies", ".trained"}]


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_goes_on_once_there_is_space(
    values, tmp_path, small_disk, caplog
):
    values |= {"strategy": "fedjudge-base", "adapter.rank": 16, "rounds": 2}
    unbroken = serve(values | folders(tmp_path / "a"))
    # In turn, a reply, a personalised adapter and a checkpoint don't fit.
    for about, free in ((("train", 2), 0), (("train", 2), 76), (("evaluate", 1), 12)):
        own = {"output-dir": str(small_disk / str(free)), "state-path": str(tmp_path / str(free))}
        there = values | own

        def fill_disk(replies, free=free):
            fill(small_disk, free)
            return replies

        with pytest.raises(DiskFullError, match=f"no space is left on the disk of {small_disk}"):
            serve(there, Altered(there, NODES, about, fill_disk))
        directory = newest(there)
        assert f'resume = "{directory}"' in caplog.text
        assert checkpoints(directory) == [0, 1]
        assert not unfinished(directory)
        seen = read_run_state(directory)
        assert not seen.is_running and seen.exit_status == 1
        (small_disk / "ballast").unlink()
        assert serve(there | {"resume": str(directory)}) == directory
        assert same(final(unbroken), final(directory))
        assert events(unbroken) == events(directory)


@pytest.mark.slow
def test_a_run_killed_while_writing_resumes_from_the_one_before(values, tmp_path):
    # Write a large checkpoint, so that there is time to kill the process.
    values |= {"strategy": "fedjudge-base", "rounds": 1, "adapter.rank": 5_000}
    values |= {"train.local-steps": 1}
    here, there = (values | folders(tmp_path / name) for name in ("a", "b"))
    # On a busy machine, the signal may come too late.
    for _ in range(5):
        directory = kill_while_writing(there, "round-0001.safetensors")
        if checkpoints(directory) == [0]:
            break
    assert checkpoints(directory) == [0]
    assert unfinished(directory)
    assert serve(there | {"resume": str(directory)}) == directory
    assert not unfinished(directory)
    assert same(final(serve(here)), final(directory))


def serve_until_killed(values: dict) -> None:
    """Run the ServerApp; this process is killed after the checkpoint of the last evaluation."""
    write = results.save_checkpoint

    def write_and_die(directory, checkpoint, *other):
        write(directory, checkpoint, *other)
        if checkpoint.progress.evaluated and checkpoint.progress.finished_rounds:
            os.kill(os.getpid(), signal.SIGKILL)

    results.save_checkpoint = write_and_die
    serve(values)


@pytest.mark.slow
def test_a_run_killed_after_its_last_checkpoint_is_completed(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": 1}
    here, there = (values | folders(tmp_path / name) for name in ("a", "b"))
    unbroken = serve(here)
    process = multiprocessing.get_context("fork").Process(target=serve_until_killed, args=(there,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL
    directory = newest(there)
    assert read_run_state(directory).exit_status == 1
    resumed = there | {"resume": str(directory)}
    with pytest.raises(ConfigError, match="has finished its 1 rounds; raise rounds"):
        serve(resumed | {"rounds": 0})  # no client has saved final adapters for this number
    assert serve(resumed, InProcessGrid(there, {})) == directory
    assert same(final(unbroken), final(directory))
    assert events(unbroken) == events(directory)
    assert files(unbroken) == files(directory)
    assert read_status(directory).replied == read_status(unbroken).replied
    assert read_run_state(directory).exit_status == 0
    with pytest.raises(ConfigError, match="has finished its 1 rounds; raise rounds"):
        serve(resumed)


def files(directory: Path) -> list[Path]:
    """Return the files of a run, except TensorBoard's, of which a resumed run has several."""
    found = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if path.parts[0] != "tensorboard")


@pytest.mark.slow
def test_a_run_goes_on_without_the_adapter_that_it_began_with(values, tmp_path):
    def stop(replies):
        raise ConnectionError

    values |= {"strategy": "fedjudge-base", "rounds": 1, "state-path": str(tmp_path / "state")}
    initial = serve(values | {"output-dir": str(tmp_path / "a")}) / "adapters" / "global"
    values |= {"rounds": 2, "output-dir": str(tmp_path / "b"), "initial-adapter": str(initial)}
    with pytest.raises(ConnectionError):
        serve(values, Altered(values, NODES, ("train", 2), stop))
    directory = newest(values)
    shutil.rmtree(initial)
    assert serve(values | {"resume": str(directory)}) == directory
    assert checkpoints(directory) == [1, 2]


def kill_while_writing(values: dict, name: str) -> Path:
    """Run the ServerApp in a subprocess, and kill it while it writes a checkpoint."""
    process = multiprocessing.get_context("fork").Process(target=serve, args=(values,))
    process.start()
    end = time.monotonic() + SECONDS
    runs, aside = Path(values["output-dir"]), f".{name}.{process.pid}.new"
    # Check without a pause, because the file exists only briefly and can be missed.
    while not list(runs.glob(f"*/checkpoints/{aside}")) and process.is_alive():
        assert time.monotonic() < end
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return newest(values)


def test_an_interrupted_replacement_leaves_the_old_content(tmp_path):
    for name in ("adapter", "other"):
        with replacing(tmp_path / name) as aside:
            aside.mkdir()
            (aside / "weights").write_text("old")
    # As left by processes killed between two renames, and while writing.
    (tmp_path / "adapter").rename(tmp_path / ".adapter.4711.old")
    shutil.copytree(tmp_path / "other", tmp_path / ".adapter.4711.new")
    (tmp_path / ".other.4712.new").mkdir()
    (tmp_path / ".hidden").touch()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "other", ".hidden"}
    assert (tmp_path / "adapter" / "weights").read_text() == "old"


def test_a_folder_whose_removal_was_interrupted_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "trained" / "alpha").mkdir(parents=True)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        remove_whole(tmp_path / "trained")
    assert not (tmp_path / "trained").exists()
    remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_in_the_order_of_their_rounds(tmp_path):
    for number in ("10000", "9999", "0002", "0002 (copy)"):
        file = tmp_path / "checkpoints" / f"round-{number}.safetensors"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    names = [file.stem for file in checkpoint_files(tmp_path)]
    assert names == ["round-0002", "round-9999", "round-10000"]
