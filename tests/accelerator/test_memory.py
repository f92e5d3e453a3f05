"""The memory that a device needs, and errors if it has too little or a kernel fails."""

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch
from torch.nn.functional import cross_entropy

from chambers.__main__ import main
from client_app.worker import TRY_AGAIN
from federation.messages import ARRAYS
from federation.site_file import VARIABLE
from finetuning.devices import default_device, default_dtype
from finetuning.model.output_head import output_head, target_log_probabilities
from split.protocol.errors import PeerError
from tests.client_app.worker_process import ROOT
from tests.site_files import write_site
from tests.split.clients import Client, serving, split_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.accelerator

CHECKPOINTING = "model.gradient-checkpointing = true"


def test_weights_are_bfloat16_only_where_a_device_has_it(device):
    assert default_dtype(default_device()) is torch.bfloat16
    device.has_bfloat16 = False
    try:
        assert default_dtype(default_device()) is torch.float32
    finally:
        device.has_bfloat16 = True


@torch.no_grad()
def test_scoring_makes_no_float32_copy_of_the_output_head(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2**17, hidden_size=256, intermediate_size=64, num_hidden_layers=1
    )
    model = LlamaForCausalLM(config).to(default_device(), torch.bfloat16)
    chosen = torch.randn(4, 256, device=model.device, dtype=torch.bfloat16)
    labels = torch.arange(4)
    device.peak(0)
    before = device.used(0)
    found, *_ = target_log_probabilities(output_head(model), chosen, labels)
    assert device.peak(0) - before < 2**25 < 4 * model.lm_head.weight.numel() / 2
    logits = chosen.cpu().double() @ model.lm_head.weight.cpu().double().T
    expected = -cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_client_says_what_did_not_fit(device, site, caplog):
    """The coordinator gets only a summary; the client's log has the full error."""
    assert ARRAYS in site.ask("train").content
    with device.room(0, 1_000):
        problem = site.refusal("train")
    assert problem.startswith("out of memory: Tried to allocate ")
    assert "bytes. GPU 0 has a total capacity of " in problem
    assert "; lower train.batch-size" in problem and problem.endswith(CHECKPOINTING)
    assert "OutOfMemoryError" in caplog.text
    assert ARRAYS in site.ask("train").content, "with room, it trains"


@pytest.mark.parametrize("schedule", ["serial", "client-batch"])
def test_a_client_learns_that_the_server_has_no_room(device, base, beginning, schedule):
    split = split_settings(schedule=schedule, body_devices="cuda:1")
    remedy = "at the server, lower split.activation-budget"
    with serving(base, beginning, split) as server:

        def train(name: str, disturb=lambda _: None) -> str:
            server.begin_round({name: 9}, 0)
            Client(name, base, split).train(server, beginning, steps=2, disturb=disturb)
            (account,) = server.finish_lanes()
            return account.error

        assert not train("alpha")
        used = device.used(1)
        with ExitStack() as stack:

            def leave_little(_: object) -> None:
                stack.enter_context(device.room(1, 200_000))

            with pytest.raises(PeerError, match=f"out of memory: .* GPU 1 has .*{remedy}"):
                train("beta", leave_little)
        (account,) = server.finish_lanes()
        assert remedy in account.error
        assert device.used(1) <= used, "memory was not freed"
        assert not train("gamma"), "with room, the server trains the next client"


def test_a_worker_ends_after_a_failed_kernel(device, site, tmp_path, monkeypatch):
    """The worker answers first. A supervisor restarts it, and it can use the device again."""
    socket = tmp_path / "worker.sock"
    own = {"policy": site.node["policy"], "worker": socket}
    monkeypatch.setenv(VARIABLE, str(write_site(tmp_path, "court", site.data, **own)))
    site.node = {}
    module = "tests.accelerator.broken_worker"
    with subprocess.Popen([sys.executable, "-m", module], cwd=ROOT) as process:
        wait_until(lambda: socket.exists() or process.poll() is not None, 120)
        assert "a kernel failed on the GPU" in site.refusal("train")
        assert process.wait(60) == TRY_AGAIN


def test_a_server_ends_after_a_failed_kernel(
    device, deep_checkpoint, tmp_path, capsys, monkeypatch
):
    """A supervisor restarts the server; its clients need new invitations."""
    monkeypatch.setattr(
        signal, "signal", lambda *_: None
    )  # leave this process's signal handlers unchanged
    words = ["--model", deep_checkpoint, "--clients", "court", "--listen", "127.0.0.1:0"]
    words += ["--invitations", tmp_path]
    with ExitStack() as stack:

        def fail() -> None:
            wait_until((tmp_path / "court.json").exists, 120)
            stack.enter_context(device.broken())

        thread = threading.Thread(target=fail)
        thread.start()
        status = main(["serve", *map(str, words)])
        thread.join()
    assert status == 2
    assert "a GPU kernel has failed" in capsys.readouterr().err
