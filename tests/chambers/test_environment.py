"""Proxies, folders for temporary files and modules of the current folder don't affect runs."""

import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from chambers.site.host import enter
from tests.chambers.conftest import ROOT

MODULES = ("split", "strategies", "client_app", "queue", "torch", "ray", "flwr")


@contextmanager
def recording():
    """Answer every request, as a proxy or a server; yield its URL and the requested addresses."""
    requested = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_CONNECT = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requested
        server.shutdown()
        thread.join()


def proxies_at(url):
    """Return variables that `httpx` can't read, or that name the proxy for all addresses."""
    names = ("http_proxy", "HTTPS_PROXY", "grpc_proxy")
    return dict.fromkeys(names, url) | {
        "ALL_PROXY": "socks5://127.0.0.1:9",
        "no_proxy": "fd00::/8,court.invalid",
    }


def test_only_connections_to_other_machines_use_a_proxy(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    with recording() as (proxy, at_proxy), recording() as (server, at_server):
        for name in ("NO_PROXY", "no_proxy", "PATH", "FLWR_HOME"):
            monkeypatch.setenv(name, os.environ.get(name, ""))  # to restore it
        for name, value in proxies_at(proxy).items():
            monkeypatch.setenv(name, value)
        enter(tmp_path)
        assert httpx.get(f"{server}/here").is_success
        assert httpx.get("http://hub.invalid/there").is_success
        with pytest.raises(httpx.ConnectError):
            httpx.get("http://court.invalid/exempt")
    assert (at_server, at_proxy) == (["/here"], ["http://hub.invalid/there"])


@pytest.mark.nightly
def test_a_run_uses_no_proxy_module_or_long_path_of_its_user(tmp_path):
    long = tmp_path / "a.long.name.of.a.job" / ("x" * 60)
    for folder in (long, tmp_path / "work"):
        folder.mkdir(parents=True)
    for name in MODULES:
        (tmp_path / "work" / f"{name}.py").write_text("raise RuntimeError('imported')")
    words = ("train", "tiny", "rounds=1", "train.local-steps=1", "evaluate.generate=false")
    with recording() as (proxy, at_proxy):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "chambers", *words, "--clients", "2", "output-dir=runs"],
            cwd=tmp_path / "work",
            env=os.environ | proxies_at(proxy) | {"TMPDIR": str(long), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray asks whether the machine is in a cloud.
    assert not [url for url in at_proxy if "metadata" not in url]
    assert len([*(tmp_path / "work" / "runs").glob("*/metrics.jsonl")]) == 1
    assert not [*long.iterdir()]
