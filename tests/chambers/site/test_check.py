"""``chambers site check``: each problem has a line that names it and its remedy."""

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from chambers.__main__ import main
from chambers.site.authority import INSIDE, open_authority
from chambers.site.check_coordinator import report_on_coordinator
from chambers.site.keys import open_instructions, open_node_key
from chambers.site.release import open_signing_key
from client_app.worker_socket import connected_worker, send_frame
from finetuning.model.fingerprint import combine_digests, fingerprint
from finetuning.model.locating import locate
from tests.chambers.conftest import another_user, refused
from tests.chambers.site.stand_in import proxy
from tests.client_app.worker_process import running_worker
from tests.conftest import mounted, write_rows
from tests.deployment.compose import read_services
from tests.deployment.deployment import CHECKOUT
from tests.gguf_files import write_gguf
from tests.site_files import write_site
from tests.sums import sign_members, sums_policy
from tests.waiting import wait_until


def certify(folder, name, days=365):
    open_authority(folder).issue(folder, [name, *INSIDE], days)
    open_instructions(folder)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Write a coordinator's folder with certificates and a database, and an institution's."""
    for name in ("FLWR_HOME", "PATH"):  # the command changes these variables
        monkeypatch.setenv(name, os.environ.get(name, ""))
    folder, court = tmp_path / "coordinator", tmp_path / "court"
    certify(folder, "coordinator.example.org")
    for path in (folder / "state", folder / "database", court / "state"):
        path.mkdir(parents=True)
    open_node_key(court / "node")
    open_signing_key(court / "reviewer")
    for name in ("authority.pem", "instructions.pub"):
        shutil.copy(folder / name, court)
    write_rows(court / "data" / "train.jsonl", 8, seed=1)
    write_rows(court / "data" / "test.jsonl", 3, seed=2)
    policy = f'instruction-key = "{court / "instructions.pub"}"\nmax-rounds = 5\n'
    (court / "policy.toml").write_text(policy)
    database = folder / "database" / "superlink.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    return SimpleNamespace(
        folder=folder,
        court=court,
        key=court / "node",
        trusted=court / "trusted.yaml",
        policy=court / "policy.toml",
        data=court / "data",
        database=database,
    )


def run(capsys, *words):
    """Run the check; return its exit status and output."""
    status = main(["site", "check", *map(str, words)])
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert (status == 0) == all(line.startswith(("ok ", "warn ")) for line in lines)
    return status, output


def at_institution(capsys, site, port, *words, superlink=None, name="court", **worker):
    address = superlink or f"127.0.0.1:{port}"
    (site.court / "institution.env").write_text(f"COORDINATOR={address}\n")
    write_site(site.court, name, site.data, policy=site.policy, **worker)
    return run(capsys, site.court, *words)[1]


def at_coordinator(capsys, site, port, model="", proxy=None):
    proxy = proxy or f"localhost:{port}"
    report = report_on_coordinator(site.folder, model, f"127.0.0.1:{port}", proxy)
    return 0 if report.passed else 1, capsys.readouterr().out


def test_a_coordinator_that_is_ready(capsys, site, checkpoint):
    with proxy(site.folder) as port:
        status, output = at_coordinator(capsys, site, port, checkpoint)
    assert status == 0, output
    assert "valid for 364 days" in output and "valid for 3650 days" in output
    # With fl-glm, the coordinator computes the model's body.
    assert f"model: {checkpoint} has the digest " in output
    assert "ok   GPU: " in output


def test_a_database_that_can_fill_other_files_disk(capsys, site, monkeypatch):
    results = site.data / "runs"
    monkeypatch.setenv("XDG_DATA_HOME", str(results))
    _, output = at_coordinator(capsys, site, 1)
    shared = f"{site.folder} and {results / 'chambers' / 'runs'}"
    assert f"warn {site.database.parent} is on the same file system as {shared}: messages" in output
    assert f"GiB free in {site.data}" in output
    assert f"warn {site.folder / 'proxy' / 'access.log'} doesn't exist, so" in output
    folder = site.database.parent
    with mounted(folder, "2m"):
        _, output = at_coordinator(capsys, site, 1)
    assert f"ok   {folder} is on a file system of its own" in output
    assert f"fix  disk: 0.0 GiB free in {folder}; at least 5 GiB are needed: add space" in output


def test_a_coordinator_without_the_model_or_a_port(capsys, site, tmp_path):
    _, output = at_coordinator(capsys, site, 1, str(tmp_path / "none"), "coordinator.example.org")
    assert "no config.json in" in output
    assert "coordinator.example.org must be an address and a port" in output


def test_certificates_that_do_not_fit(capsys, site, tmp_path):
    renew = f"delete {site.folder / 'server.pem'}, and run chambers site coordinator again"
    with proxy(site.folder) as port:
        _, output = at_coordinator(capsys, site, port, proxy=f"127.0.0.2:{port}")
        assert "nothing listens there" in output
        certify(site.folder, "coordinator.example.org", days=20)
        _, output = at_coordinator(capsys, site, port)
        assert "expires in 19 days" in output
        assert f"{renew}, then restart the proxy and the SuperLink" in output
        assert output.count("does not use the certificate") == 2
        (site.folder / "server.key").chmod(0o644)
        assert "chmod 600" in at_coordinator(capsys, site, port)[1]
        (site.folder / "instructions.key").chmod(0o644)
        assert (
            "instructions.key can be read by other users" in at_coordinator(capsys, site, port)[1]
        )
        certify(tmp_path / "other", "127.0.0.2")
        shutil.copy(tmp_path / "other" / "server.pem", site.folder)
        _, output = at_coordinator(capsys, site, port)
    assert f"server.key is not the key of {site.folder / 'server.pem'}: {renew}" in output
    assert f"is not signed by {site.folder / 'authority.pem'}: {renew}" in output


def test_the_way_to_the_superlink(capsys, site):
    with proxy(site.folder, health=502, control=404) as port:
        _, output = at_coordinator(capsys, site, port)
    assert output.count("can't reach the SuperLink; start the SuperLink") == 2
    with proxy(site.folder, control=404) as port:
        _, output = at_coordinator(capsys, site, port)
        assert "answers 404 to /v1/control/ instead of 403" in output
        assert "answers 404 to /v1/control/ instead of 403" in at_institution(capsys, site, port)
    connection = site.folder / "state" / ".flwr" / "config.toml"
    connection.parent.mkdir()
    connection.write_text('superlink = "127.0.0.1:8000"\n')
    assert f"{connection} has no address" in run(capsys, site.folder)[1]


def test_the_database(capsys, site):
    with proxy(site.folder) as port:
        site.database.write_text("not a database, but a text of some length")
        assert "can't be written: file is not a database" in at_coordinator(capsys, site, port)[1]
        site.database.unlink()
        assert "doesn't exist: start the SuperLink" in at_coordinator(capsys, site, port)[1]


def test_what_an_institution_sees(capsys, site, checkpoint):
    with proxy(site.folder) as port:
        output = at_institution(capsys, site, port, "--model", checkpoint)
    lines = output.splitlines()
    # The only problem: the stand-in for the SuperLink doesn't know node keys.
    (problem,) = (line for line in lines if line.startswith("fix"))
    assert f"127.0.0.1:{port} answers 501 to /v1/fleet/" in problem
    assert f"ok   court: 8 training rows and 3 held-out rows in {site.data}" in lines
    assert any(f"model: {checkpoint} has the digest " in line for line in lines)


def test_tls_errors_name_the_cure(capsys, site, tmp_path):
    certify(tmp_path / "other", "other.example.org")
    own = (site.court / "authority.pem").read_bytes()
    with proxy(site.folder) as port:
        shutil.copy(tmp_path / "other" / "authority.pem", site.court)
        output = at_institution(capsys, site, port)
        assert "is not signed by the authority in" in output
        assert "get authority.pem from the coordinator" in output
        (site.court / "authority.pem").write_bytes(own)
        output = at_institution(capsys, site, port, superlink=f"127.0.0.2:{port}")
        assert "nothing listens there" in output
    # The address is this machine's, but the certificate lacks the name.
    open_authority(site.folder).issue(site.folder, ["other.example.org"], 90)
    with proxy(site.folder) as port:
        output = at_institution(capsys, site, port, superlink=f"localhost:{port}")
        assert "is not valid for the name localhost" in output
        assert "the coordinator for a certificate that is valid for localhost" in output
        output = at_institution(capsys, site, port)
        assert "is not valid for the name 127.0.0.1" in output
    open_authority(site.folder).issue(site.folder, ["127.0.0.1"], 0)
    with proxy(site.folder) as port:
        output = at_institution(capsys, site, port)
        assert "has expired" in output and "the coordinator must renew it" in output


def test_addresses_that_do_not_answer(capsys, site):
    for address in ("localhost", "bad host:8443", "localhost:99999"):
        output = at_institution(capsys, site, 0, superlink=address)
        assert f"{address} must be an address and a port" in output
    output = at_institution(capsys, site, 0, superlink="no-such-host.invalid:443")
    assert "the name no-such-host.invalid is unknown here" in output
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert "it doesn't speak TLS" in at_institution(capsys, site, port)
        thread.join()


@pytest.mark.parametrize(
    ("ahead", "text"),
    [
        (3600, "behind the coordinator's; beyond 5 s ahead or 300 s behind, the SuperLink"),
        (-3600, "ahead of the coordinator's; beyond 5 s ahead"),
    ],
)
def test_clocks_that_differ(capsys, site, ahead, text):
    with proxy(site.folder, ahead) as port:
        said = at_institution(capsys, site, port)
    (seconds,) = re.findall(rf"fix  clock: about (\d+) s {re.escape(text)}", said)
    assert 3590 < int(seconds) < 3700  # a busy machine may be slow to answer


def test_keys(capsys, site):
    site.key.chmod(0o640)
    assert f"chmod 600 {site.key}" in at_institution(capsys, site, 1)
    site.key.unlink()
    assert f"{site.key} can't be read" in at_institution(capsys, site, 1)
    key = ec.generate_private_key(ec.SECP384R1())
    site.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert "chambers site join writes one" in at_institution(capsys, site, 1)
    shutil.copy(site.court / "reviewer", site.key)
    assert "node is not a key that Flower can read" in at_institution(capsys, site, 1)


def test_trusted_entities(capsys, site):
    for content in ("", "{}", "- fpk_1"):
        site.trusted.write_text(content)
        assert "names no key" in at_institution(capsys, site, 1)
    site.trusted.write_text(f"fpk_node: {(site.court / 'node.pub').read_text()}")
    assert "fpk_node is not an Ed25519 key" in at_institution(capsys, site, 1)
    site.trusted.chmod(0o646)
    assert f"other users can change {site.trusted}" in at_institution(capsys, site, 1)


def test_policy(capsys, site):
    site.policy.write_text("max-rounds = 5\n")
    assert "names no instruction-key" in at_institution(capsys, site, 1)
    site.policy.write_text(f'instruction-key = "{site.folder / "authority.pem"}"\n')
    assert "is not an Ed25519 public key" in at_institution(capsys, site, 1)
    account = site.folder / "account.jsonl"
    site.policy.write_text(
        f'instruction-key = "{site.folder / "instructions.pub"}"\n'
        f'audit-log = "{site.folder / "log"}"\n[privacy]\nepsilon = 8\n'
        f'delta = 1e-5\naccount = "{account}"\n'
    )
    assert "spent: ε = 0 of 8 at δ = 1e-05" in at_institution(capsys, site, 1)
    steps = '"sampling-rate": 1.0, "noise-multiplier": 2.0, "steps": 1}\n'
    (site.folder / "log").write_text('{"event": "privacy", ' + steps)
    assert "fix  the site's privacy account lacks training steps" in at_institution(capsys, site, 1)
    account.write_text("{" + steps)
    # The minimum over α of α / 8 + log(1 - 1/α) - log(δα) / (α - 1), for one step on all rows.
    assert "spent: ε = 2.17 of 8 at δ = 1e-05" in at_institution(capsys, site, 1)
    account.write_text("{}\n")
    assert "contains a line that is not an entry" in at_institution(capsys, site, 1)
    site.policy.write_text("max-round = 5\n")
    assert "max-round: unknown key" in at_institution(capsys, site, 1)


def test_masked_sums(capsys, site, tmp_path):
    policy = site.policy.read_text()
    assert "the policy has no table [sums]" in at_institution(capsys, site, 1)
    sign_members(tmp_path, ["court", "firm", "hospital"], ["a", "b", "c", "d"])
    site.policy.write_text(policy + sums_policy(tmp_path, "court"))
    assert "ok   sums: court, firm, hospital form a group" in at_institution(capsys, site, 1)
    assert "is in no group of" in at_institution(capsys, site, 1, name="delta")
    assert "is not the key of firm" in at_institution(capsys, site, 1, name="firm")
    site.policy.write_text(policy + sums_policy(tmp_path, "court") + "min-peers = 4\n")
    assert "the group has 3 members, but min-peers = 4" in at_institution(capsys, site, 1)
    site.policy.write_text(policy + sums_policy(tmp_path, "court", only=False))
    assert "warn sums: court, firm, hospital" in at_institution(capsys, site, 1)
    (tmp_path / "court-peer").chmod(0o640)
    assert "court-peer can be read by other users" in at_institution(capsys, site, 1)
    (tmp_path / "court-peer").unlink()
    assert "court-peer' can't be read" in at_institution(capsys, site, 1)
    site.policy.write_text(policy + "[sums]\nonly = true\n")
    assert "sums needs members, reviewers and key" in at_institution(capsys, site, 1)


def test_data_and_model(capsys, site, checkpoint, tmp_path):
    assert "name: must be at most 64 letters" in at_institution(capsys, site, 1, name="a/b")
    site.data.rename(tmp_path / "moved")
    assert f"{site.data} doesn't exist" in at_institution(capsys, site, 1)
    site.data.symlink_to(tmp_path)
    assert "has no train.jsonl" in at_institution(capsys, site, 1)
    site.data.unlink()
    site.data.symlink_to(tmp_path / "moved")
    (site.data / "train.jsonl").write_text('{"instruction": "a"}\n')
    assert "train.jsonl" in at_institution(capsys, site, 1)
    row = {"question": "is it a tax?", "passage": "It is.", "idx": 0, "label": True}
    for part in ("train", "val"):
        (site.data / f"{part}.jsonl").write_text(f"{json.dumps(row)}\n")
    assert "add --task" in at_institution(capsys, site, 1)
    output = at_institution(capsys, site, 1, "--task", "boolq")
    assert "court: 1 training rows and 1 held-out rows in" in output
    assert "--task none: Input should be" in at_institution(capsys, site, 1, "--task", "none")
    output = at_institution(capsys, site, 1, "--model", tmp_path / "none")
    assert "no config.json in" in output
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    output = at_institution(capsys, site, 1, "--model", file)
    assert (
        f"model: {file} has the digest {combine_digests(fingerprint(locate(str(file))))}" in output
    )


def test_files_that_may_not_be_read(capsys, site, tmp_path, monkeypatch):
    """An unreadable file fails only the check that reads it."""
    lines = len(at_institution(capsys, site, 1).splitlines())
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(closed / "state"))
    policy = site.policy.read_text()
    site.policy.write_text(f'audit-log = "{tmp_path / "audit.jsonl"}"\n{policy}')
    site.data.rename(closed / "data")
    site.data.symlink_to(closed / "data")
    database = site.database.parent
    closed.chmod(0)
    database.chmod(0)
    with another_user():
        _, output = run(capsys, site.court)
        _, other = at_coordinator(capsys, site, 1)
    closed.chmod(0o700)
    database.chmod(0o700)
    cure = "Permission denied; run this as the SuperLink's or SuperNode's user"
    assert f"fix  {site.data} can't be read: {cure}" in output
    assert f"fix  {closed}/state/chambers can't be read: {cure}" in output
    assert f"fix  {tmp_path} can't be written by this user" in output  # the audit log's folder
    assert len(output.splitlines()) == lines
    assert f"fix  {site.database} can't be read: {cure}" in other


@pytest.mark.slow
def test_worker(capsys, site, tmp_path):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    path = own / "worker.sock"
    assert "worker: none" in at_institution(capsys, site, 1)
    output = at_institution(capsys, site, 1, worker=path)
    assert f"fix  the worker at {own / 'worker.sock'} is not running (No such file" in output
    variables = {"COORDINATOR": "", "INSTITUTION": "court"}
    services = read_services(CHECKOUT / "docker" / "institution.yml", variables)
    healthy = [sys.executable, *services["worker"].health[1:]]
    quiet = subprocess.DEVNULL
    assert subprocess.run(healthy, check=False, stderr=quiet, cwd=own).returncode != 0
    with running_worker(own, site.data) as worker:
        subprocess.run(healthy, check=True, cwd=own)
        output = at_institution(capsys, site, 1, worker=path)
        assert f"ok   the worker at {own / 'worker.sock'} is running" in output
        # The worker answers callers in turn, and logs nothing about those who send no message.
        with connected_worker(own / "worker.sock") as caller:
            send_frame(caller, b"other code")
            wait_until(lambda: "refused a message" in worker.log.read_text(), 60)
        said = worker.log.read_text().partition("the worker runs the code")[2]
        assert said.count("\n") == 2, said
        own.chmod(0o777)
        assert "every user can write to" in at_institution(capsys, site, 1, worker=path)


def test_the_contact_of_the_supernode(capsys, site):
    class Health(BaseHTTPRequestHandler):
        status, content = 503, b'{"offline-since": "2026-01-02T03:04:05+00:00"}'

        def do_GET(self):
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(self.content)

        def log_message(self, *_):
            pass

    with proxy(site.folder) as port:
        assert "warn the SuperNode isn't running" in at_institution(capsys, site, port)
        with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            (site.court / "state" / "supernode.port").write_text(str(server.server_port))
            output = at_institution(capsys, site, port)
            assert "fix  the SuperNode is offline since 2026-01-02T03:04:05+00:00 (UTC)" in output
            Health.status = 200
            assert "ok   the SuperNode is in contact with" in at_institution(capsys, site, port)
            server.shutdown()


def test_a_folder_that_is_not_a_hosts(capsys, tmp_path):
    assert "is not a host's folder" in refused(capsys, "site", "check", tmp_path)
