"""``chambers serve``: standing invitations, their expiry, and the end of the server process."""

import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest
import torch

from chambers import models
from chambers.__main__ import parse
from chambers.lane_model import explain_lane_error
from chambers.models import read_invitation
from chambers.serving import serve_models
from split.protocol.errors import LaneDeadlineError, LaneTimeoutError
from tests.chambers.conftest import execute, refused, serve, write_run
from tests.split.lanes import Proxy


@contextmanager
def serving_here(folder, *words, lifetime=60.0, **split):
    """Serve in this process; return the address and the invitations' files."""
    served = parse(["serve", *map(str, words), "--invitations", str(folder)]).find_models()
    changed = replace(served, split=served.split.model_copy(update=split))
    with serve_models(changed, lifetime) as opened:
        yield opened


def alter(invitation, **changes):
    """Change values in an invitation's file."""
    invitation.write_text(json.dumps(json.loads(invitation.read_text()) | changes))


def generating(run_folder, invitation):
    adapter = run_folder / "adapters" / "global"
    words = ("--adapter", adapter, "--invitation", invitation, "--max-new-tokens", "3", "a")
    return ["generate", *words]


@pytest.mark.slow
def test_sigterm_ends_everything(run_folder, tmp_path, capsys):
    with serve(run_folder, "--clients", "alpha", log=tmp_path / "log") as (process, lines):
        assert lines[-1].startswith("serving blocks 1 to 2 at 127.0.0.1:")
        invitation = tmp_path / "invitations" / "alpha.json"
        assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
        execute(capsys, *generating(run_folder, invitation))
        everything = [psutil.Process(process.pid)]
        everything += everything[0].children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not psutil.wait_procs(everything, timeout=5)[1]
    refusal = refused(capsys, *generating(run_folder, invitation))
    assert "no block server answers at 127.0.0.1" in refusal
    secret = json.loads(invitation.read_text())["secret"]
    assert secret not in (tmp_path / "log").read_text()


def test_an_invitation_expires(run_folder, tmp_path, capsys):
    with serving_here(tmp_path, run_folder, lifetime=0.5) as (_, files):
        words = generating(run_folder, files["alpha"])
        time.sleep(1.0)
        assert "expired on" in refused(capsys, *words)
        # The server also refuses clients whose clocks are slow or whose lanes are open.
        alter(files["alpha"], expires="2100-01-01T00:00:00Z")
        assert "this invitation has expired; ask" in refused(capsys, *words)


class CuttingProxy(Proxy):
    """Forwards TCP; cuts the first connection once the client has received a number of bytes."""

    def __init__(self, address, bytes_down):
        self._bytes_down = bytes_down
        super().__init__(address)

    @property
    def connections(self):
        return len(self._sockets) // 2

    def _pump(self, source, target, name):
        with suppress(OSError):
            while content := source.recv(65536):
                setattr(self, name, getattr(self, name) + len(content))
                target.sendall(content)
                if self.connections == 1 and self.down > self._bytes_down:
                    break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_lane_that_is_cut_is_replaced(run_folder, tmp_path, capsys):
    """The batch is generated again, with the same random numbers."""
    adapter = run_folder / "adapters" / "global"
    words = ["generate", "--adapter", adapter, "--temperature", 0.8, "--max-new-tokens", 60]
    words += ["--batch-size", 1, "the court", "a claim", "goods"]
    with serving_here(tmp_path, run_folder) as (address, files):
        proxy = CuttingProxy(address, bytes_down=20_000)
        alter(files["alpha"], address=proxy.address)
        assert execute(capsys, *words, "--invitation", files["alpha"]) == execute(capsys, *words)
        assert proxy.connections > 1


@pytest.mark.slow
def test_a_slow_reader_gets_the_rest(run_folder, tmp_path, capsys):
    """The texts are requested after the lane has been silent for longer than the server waits."""
    adapter, fifo = run_folder / "adapters" / "global", tmp_path / "fifo"
    words = ["generate", "--adapter", adapter, "the court", "a claim"]
    execute(capsys, *words, "--output", tmp_path / "whole")
    os.mkfifo(fifo)
    read = []

    def slow():
        time.sleep(3.0)
        read.append(fifo.read_text())

    with serving_here(tmp_path, run_folder, frame_timeout=1.0) as (_, files):
        reader = threading.Thread(target=slow)
        reader.start()
        execute(capsys, *words, "--output", fifo, "--invitation", files["alpha"])
        reader.join(20)
    assert read == [(tmp_path / "whole").read_text()]


def test_a_lane_that_ended_between_batches_is_replaced(run_folder, tmp_path):
    prompts = torch.ones(1, 5).long(), torch.ones(1, 5).long(), 3
    with serving_here(tmp_path, run_folder, resume_timeout=0.1) as (address, files):
        proxy = Proxy(address)
        alter(files["alpha"], address=proxy.address)
        options = parse(list(map(str, generating(run_folder, files["alpha"]))))
        with models.load_source(models.find_source(options, options.invitation)) as model:
            expected = model.generate(*prompts, pad_token_id=0)
            proxy.stop()
            time.sleep(1.5)  # the server gives up the lane
            Proxy(address, proxy.port)
            assert model._model.lane.wait_ended(20)
            assert torch.equal(model.generate(*prompts, pad_token_id=0), expected)


@pytest.mark.nightly
def test_a_cut_after_the_last_text_changes_nothing(run_folder, tmp_path):
    with serve(run_folder, log=tmp_path / "log") as (process, _):
        words = generating(run_folder, tmp_path / "invitations" / "alpha.json")
        options = parse(list(map(str, words)))
        source = models.find_source(options, options.invitation)
        with models.load_source(source):
            process.kill()
            process.wait(20)


def test_timeout_messages_name_no_setting_of_a_run(run_folder, tmp_path):
    with serving_here(tmp_path, run_folder) as (_, files):
        invitation = read_invitation(files["alpha"])
    late = LaneTimeoutError("the block server sent nothing for 300 s (split.frame-timeout)")
    assert "127.0.0.1" in str(explain_lane_error(late, invitation))
    assert "it has not answered in time; " in str(explain_lane_error(late, invitation))
    over = LaneDeadlineError("the lane's deadline has passed (round-timeout)")
    assert "this invitation has expired; ask" in str(explain_lane_error(over, invitation))


def test_devices_are_those_of_the_run_or_the_flag(base, tmp_path, capsys):
    run = write_run(tmp_path / "run", base, **{"split.body-devices": "cuda:99"})
    refusal = refused(capsys, "serve", run, "--invitations", tmp_path / "invitations")
    assert "--body-devices names cuda:99, which the server doesn't have" in refusal
    with serving_here(tmp_path, run, "--body-devices", "cpu") as (_, files):
        execute(capsys, *generating(run, files["alpha"]))


def test_starting_anew_revokes_invitations(run_folder, tmp_path, capsys):
    with serving_here(tmp_path / "one", run_folder) as (address, old):
        pass
    with serving_here(tmp_path / "two", run_folder, "--listen", address) as (_, new):
        refusal = refused(capsys, *generating(run_folder, old["alpha"]))
        assert "was restarted after this invitation was written" in refusal
        execute(capsys, *generating(run_folder, new["alpha"]))


@pytest.mark.slow
def test_what_is_no_invitation_is_refused_without_its_secret(run_folder, tmp_path, capsys):
    with serving_here(tmp_path, run_folder) as (_, files):
        content = json.loads(files["alpha"].read_text())
        changes = {
            "is not an invitation": [{"format": "other"}, {"secret": 3}, {"secret": "c2hvcnQ="}]
            + [{"address": address} for address in ("here", ":8900", "h:0", "h:65536", "h:1\n")],
            "the invitation was altered": [{"client": "beta"}, {"secret": "A" * 43 + "="}],
        }
        for reason, odd in changes.items():
            for change in odd:
                files["alpha"].write_text(json.dumps(content | change))
                refusal = refused(capsys, *generating(run_folder, files["alpha"]))
                assert reason in refusal, change
                assert content["secret"] not in refusal
        for text in ("", "{}", "[1", json.dumps({**content, "more": 1})):
            files["alpha"].write_text(text)
            refusal = refused(capsys, *generating(run_folder, files["alpha"]))
            assert "is not an invitation" in refusal
            assert content["secret"] not in refusal


def test_the_base_model_may_lie_elsewhere_at_the_client(run_folder, base, tmp_path, capsys):
    """A client's adapter that is not in a run's folder may name its base model."""
    adapter = shutil.copytree(run_folder / "adapters" / "global", tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}
    file.write_text(json.dumps(config))
    with serving_here(tmp_path, run_folder) as (_, files):
        alter(files["alpha"], model="/srv/nowhere")
        words = ["generate", "--invitation", files["alpha"], "--max-new-tokens", "3", "a"]
        execute(capsys, *words, "--adapter", adapter)
        assert "no base model in /srv/nowhere on this machine" in refused(capsys, *words)


def test_a_client_may_have_no_more_than_agreed(run_folder, tmp_path, capsys):
    with serving_here(tmp_path, run_folder, "--max-tokens", 40) as (_, files):
        words = generating(run_folder, files["beta"])
        execute(capsys, *words)
        refusal = refused(capsys, *words[:-1], "court " * 50)
        assert "the block server allows 40" in refusal
    with serving_here(tmp_path, run_folder, "--max-prompt-length", 40) as (_, files):
        words = generating(run_folder, files["beta"])
        execute(capsys, *words)
        refusal = refused(capsys, *words[:-1], "court " * 50)
        assert "the block server allows only 40 in a prompt" in refusal


@pytest.mark.slow
def test_a_single_adapter_and_the_base_alone_are_served(run_folder, base, tmp_path, capsys):
    adapter = run_folder / "adapters" / "clients" / "beta"
    cut = ("--head-blocks", 2, "--tail-blocks", 0, "--wire-dtype", "float32", "--clients", "court")
    with serving_here(tmp_path, "--adapter", adapter, *cut) as (_, files):
        words = ["generate", "--adapter", adapter, "a contract"]
        assert execute(capsys, *words, "--invitation", files["court"]) == execute(capsys, *words)
    with serving_here(tmp_path, "--model", base, *cut) as (_, files):
        words = ["generate", "--model", base, "a contract"]
        assert execute(capsys, *words, "--invitation", files["court"]) == execute(capsys, *words)
        refusal = refused(capsys, *generating(run_folder, files["court"]))
        assert "has for court (base)" in refusal


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["/nowhere"], "/nowhere is not a run's folder"),
        ([], "nothing to serve: "),
        (["RUN", "--adapter", "/nowhere"], "can't be combined"),
        (["RUN", "--listen", "0.0.0.0:0"], "--advertise HOST:PORT is needed"),
        (["RUN", "--advertise", "192.0.2.1:0"], "must have a port other than 0"),
        (["RUN", "--listen", "nonsense"], "--listen nonsense: must be an address and a port"),
        (["RUN", "--listen", "192.0.2.1:0"], "does not have that address"),
        (["RUN", "--listen", "TAKEN"], "the port is in use"),
        (["RUN", "--head-blocks", "3"], "leave the server none of the 4 blocks"),
        (["RUN", "--max-tokens", "0"], "--max-tokens 0"),
        (["RUN", "--valid-for", "0"], "--valid-for 0"),
        (["RUN", "--valid-for", "3651"], "--valid-for 3651"),
        (["RUN", "--body-devices", "gpu"], "--body-devices gpu"),
        (["RUN", "--clients", "../court"], "can't be a client's name"),
        (["RUN", "--model", "/nowhere"], "there is no base model in /nowhere"),
        (["--model", "BASE"], "no clients to invite: "),
    ],
)
def test_what_cannot_be_served_is_refused(run_folder, base, capsys, words, reason):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {
            "RUN": run_folder,
            "BASE": base,
            "TAKEN": f"127.0.0.1:{taken.getsockname()[1]}",
        }
        assert reason in refused(capsys, "serve", *(names.get(word, word) for word in words))


def test_a_folder_for_invitations_that_is_a_file_is_refused(run_folder, tmp_path, capsys):
    (tmp_path / "file").touch()
    refusal = refused(capsys, "serve", run_folder, "--invitations", tmp_path / "file")
    assert "can't be written" in refusal
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_file_without_a_key_is_refused(tmp_path, capsys):
    (tmp_path / "key").write_text("a secret\n")
    reason = refused(capsys, "stage", "--listen", "127.0.0.1:0", "--key", tmp_path / "key")
    assert reason.startswith(f"--key {tmp_path / 'key'}: no private key")
