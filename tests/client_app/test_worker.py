"""The resident worker: answers, refused callers, and the death of the worker or a caller."""

import contextlib
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import context_to_proto, message_to_proto

from chambers.in_process import InProcessGrid
from client_app.code_digest import code_digest
from client_app.main import FailedInWorkerError, WorkerEndedError, answer
from client_app.worker import TRY_AGAIN, listening
from client_app.worker_socket import MAX_TEXT, WorkerError, receive_frame, send_frame
from federation.messages import ARRAYS, SIZE, config_of, from_arrays, metrics_of
from federation.site_file import VARIABLE
from tests.client_app.worker_process import ROOT, running_worker
from tests.conftest import write_rows
from tests.in_process import MemoryJournal, run_in_process
from tests.marks import nightly
from tests.site_files import write_site
from tests.strategies.grids import SpyingGrid, same, start
from tests.waiting import wait_until

ENDLESS = {"train.local-steps": 100_000}
NOBODY = 65534
LIGHT = """
import sys, client_app.main
assert not {"torch", "transformers", "peft", "datasets"} & sys.modules.keys()
"""
CALLER = """
import socket, sys, time
from pathlib import Path
from client_app.code_digest import code_digest
from federation.site_file import VARIABLE
from client_app.worker_socket import send_frame
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    for content in (code_digest().encode(), *(Path(name).read_bytes() for name in sys.argv[2:])):
        send_frame(connection, content)
    time.sleep(600)
"""


@dataclass(frozen=True)
class Request:
    """A train message of a real run to a site, with the ClientApp's run config."""

    message: Message
    run_config: dict
    folder: Path
    data: Path

    def context(self, worker: Path | None = None, **changes) -> Context:
        """Return Flower's context; this process and the worker then share a site file."""
        enter_site(worker, worker.parent if worker else self.folder, self.data)
        return Context(1, 1, {}, RecordDict(), self.run_config | changes)

    def adapter(self, context: Context) -> dict:
        return from_arrays(answer(self.message, context).content[ARRAYS])


def enter_site(worker: Path | None, folder: Path, data: Path) -> None:
    """Make this process one of an institution."""
    own = {"worker": worker} if worker else {}
    os.environ[VARIABLE] = str(write_site(folder, "alpha", data, **own))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(folder, folder) as running:
        yield running


@pytest.fixture
def request_(values, client_folders, tmp_path):
    node = {"name": "alpha", "data-path": str(client_folders / "alpha")}
    values |= {"state-path": str(tmp_path / "state"), "min-nodes": 1, "rounds": 1}
    values |= {"train.local-steps": 2}
    grid = SpyingGrid(values, nodes={1: node})
    start(values, grid, MemoryJournal())
    (message,) = (m for m in grid.sent if m.metadata.message_type == "train")
    return Request(message, values, tmp_path, client_folders / "alpha")


def status(path: Path, first: bytes = b"", whole: bool = True) -> str:
    """Return the worker's first answer to ``first``, by default the correct digest."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(300)  # the worker may still be importing PyTorch
        connection.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            if whole:
                send_frame(connection, first or code_digest().encode())
            else:
                connection.sendall(first)
        return receive_frame(connection, MAX_TEXT).decode()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedjudge-cl", nightly("fl-glm")])
def test_answers_are_those_without_a_worker_bit_for_bit(
    worker, values, client_folders, deep_checkpoint, tmp_path, strategy
):
    values |= {"strategy": strategy, "rounds": 2, "model.name": str(deep_checkpoint)}
    values |= {"train.optimizer-state": "keep", "min-nodes": 1, "train.local-steps": 2}

    def run(state: Path, socket: Path | None = None):
        enter_site(socket, socket.parent if socket else tmp_path, client_folders / "alpha")
        run_config = values | {"state-path": str(state)}
        return run_in_process(run_config, state, 1, InProcessGrid(run_config, {1: {}}))

    here = run(tmp_path / "here")
    before = worker.answered()
    there = run(tmp_path / "there", worker.socket)
    # The client evaluates before the first round, and trains and evaluates in two rounds.
    assert worker.answered() == before + 1 + 2 * 2
    assert all(same(here.adapters[number], there.adapters[number]) for number in (1, 2))
    assert same(here.kept["alpha"], there.kept["alpha"])
    losses = [
        [event["loss"] for event in journal.events if "loss" in event] for journal in (here, there)
    ]
    assert losses[0] == losses[1] and len(losses[0]) > 4


@pytest.mark.slow
def test_a_reply_is_addressed_as_without_a_worker(worker, request_):
    replies = [
        answer(request_.message, request_.context(path)).metadata for path in (None, worker.socket)
    ]
    one, other = ({**vars(m), "_created_at": 0, "_ttl": 0} for m in replies)
    assert one == other


@pytest.mark.slow
def test_memory_threads_and_files_do_not_grow_with_messages(worker, request_):
    process = psutil.Process(worker.process.pid)
    context = request_.context(worker.socket)

    def used(messages):
        for _ in range(messages):
            request_.adapter(context)
        return process.memory_info().rss, process.num_threads(), process.num_fds()

    memory, threads, files = used(5)
    assert used(8)[0] - memory < 5e6
    # The last message's thread and connection may not have ended yet.
    wait_until(
        lambda: process.num_threads() <= threads and process.num_fds() <= files,
        seen=lambda: (threads, process.threads(), files, process.open_files()),
    )


@pytest.mark.slow
def test_changed_files_are_noticed(worker, request_, checkpoint, tmp_path):
    data, model = tmp_path / "data", tmp_path / "model"
    write_rows(data / "train.jsonl", 6, seed=0)
    shutil.copytree(checkpoint, model)
    request_ = replace(request_, data=data)
    request_.run_config["model.name"] = str(model)
    context = request_.context(worker.socket)
    sizes = [metrics_of(answer(request_.message, context))[SIZE]]
    write_rows(data / "train.jsonl", 9, seed=0)
    sizes.append(metrics_of(answer(request_.message, context))[SIZE])
    assert sizes == [6 - 1, 9 - 1]
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("1e-06", "1e-05"))
    problem = config_of(answer(request_.message, context))["problem"]
    assert "is not the run's: it was changed" in problem


@pytest.mark.slow
def test_an_exception_crosses_by_its_name_alone(worker, request_):
    request_.message.metadata.message_type = "train.unknown"
    with pytest.raises(FailedInWorkerError, match=r"^ValueError$"):
        answer(request_.message, request_.context(worker.socket))


def test_the_entry_point_is_light():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, cwd=ROOT)


def test_other_code_is_refused(worker, tmp_path):
    for package in ("client_app", "federation", "finetuning", "split"):
        shutil.copytree(ROOT / package, tmp_path / package)
    code = "from client_app.code_digest import code_digest as d; print(d())"

    def digest() -> str:
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return ran.stdout.strip()

    assert digest() == code_digest()
    with (tmp_path / "finetuning" / "generated" / "court.toml").open("a") as file:
        file.write("\n")
    assert digest() != code_digest()
    assert "runs code other than the run's app" in status(worker.socket, digest().encode())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(worker):
    """The socket's mode keeps others out, and the kernel reports who calls."""
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600
    folders = [folder for folder in worker.socket.parents if folder != Path(folder.root)]
    modes = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        folder.chmod(modes[folder] | 0o011)
    try:
        assert as_nobody(worker.socket) == "PermissionError"
        worker.socket.chmod(0o666)
        assert f"doesn't answer user {NOBODY}" in as_nobody(worker.socket)
    finally:
        worker.socket.chmod(0o600)
        for folder in folders:
            folder.chmod(modes[folder])


def as_nobody(path: Path) -> str:
    """Return the worker's answer to a different user's process, or the name of the error."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setuid(NOBODY)
            os.write(writer, status(path).encode())
        except BaseException as error:
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer_:
        text = answer_.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_gets_no_message(request_, tmp_path, caplog):
    """The socket's owner is neither the folder's owner nor root."""
    path = tmp_path / "worker.sock"
    with listening_as_nobody(path) as heard:
        assert ARRAYS in answer(request_.message, request_.context(path)).content
        assert f"is a process of user {NOBODY}" in caplog.text
        assert heard() == b""


@contextlib.contextmanager
def listening_as_nobody(path: Path):
    """Listen in a different user's process; yield a function that returns a caller's bytes."""
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        if not (child := os.fork()):
            try:
                os.setuid(NOBODY)
                listener.listen()  # the kernel records this process's user
                os.write(writer, b"listens")
                os.write(writer, listener.accept()[0].recv(1000))
            finally:
                os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            assert pipe.read(7) == b"listens"
            yield lambda: pipe.read(1000)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_garbage_is_dropped_and_the_next_caller_answered(worker):
    source = random.Random(0)
    for size in (0, 1, 8, 9, 100, 10_000):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(worker.socket))
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(source.randbytes(size))
    for content in (b"\xff" * 8, (2**31).to_bytes(8), (9).to_bytes(8) + b"not a one"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(300)
            connection.connect(str(worker.socket))
            send_frame(connection, code_digest().encode())
            assert receive_frame(connection, MAX_TEXT) == b""
            connection.sendall(content)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert status(worker.socket) == ""


@pytest.mark.slow
def test_a_caller_that_is_killed_ends_the_work(request_, tmp_path):
    state = tmp_path / "state"
    shutil.rmtree(state)
    with running_worker(tmp_path, request_.data) as worker:
        files = tmp_path / "message", tmp_path / "context"
        context = request_.context(worker.socket, **ENDLESS)
        files[0].write_bytes(message_to_proto(request_.message).SerializeToString())
        files[1].write_bytes(context_to_proto(context).SerializeToString())
        arguments = [str(path) for path in (worker.socket, *files)]
        caller = subprocess.Popen([sys.executable, "-c", CALLER, *arguments], cwd=ROOT)
        worker.wait_until_it_answers(1)
        caller.kill()
        caller.wait()
        assert worker.process.wait(60) == TRY_AGAIN
    assert not list(state.rglob("round-*"))


@pytest.mark.slow
def test_after_a_killed_worker_messages_fall_back(request_, tmp_path, caplog):
    """The failed message isn't answered again: it may have used a lane, and was counted."""
    with running_worker(tmp_path, request_.data) as worker, ThreadPoolExecutor(1) as pool:
        context = request_.context(worker.socket, **{"train.local-steps": 50})
        first = pool.submit(answer, request_.message, context)
        worker.wait_until_it_answers(1)
        assert status(worker.socket) == "is busy with another message"
        worker.process.kill()
        worker.process.wait(20)
        with pytest.raises(WorkerEndedError, match="ended before it had answered"):
            first.result()
        answer(request_.message, request_.context(worker.socket))
        assert "is not running (Connection refused)" in caplog.text


def test_a_socket_that_others_could_replace_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with (
        pytest.raises(WorkerError, match="every user can write to"),
        listening(tmp_path / "worker.sock", shared=False),
    ):
        pass
    tmp_path.chmod(0o770)
    (tmp_path / "policy.toml").write_text("max-rounds = 3")
    with (
        pytest.raises(WorkerError, match="it is a file, not a socket"),
        listening(tmp_path / "policy.toml", shared=False),
    ):
        pass
    assert (tmp_path / "policy.toml").read_text()
    with listening(tmp_path / "worker.sock", shared=True):
        assert stat.S_IMODE((tmp_path / "worker.sock").stat().st_mode) == 0o660
        with (
            pytest.raises(WorkerError, match="already running"),
            listening(tmp_path / "worker.sock", shared=True),
        ):
            pass
