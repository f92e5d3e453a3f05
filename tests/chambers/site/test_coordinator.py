"""``chambers site coordinator``: certificates, renewal, repetition, and careless input."""

import os
import socket
import ssl
import stat
import subprocess
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from chambers.site.authority import open_authority
from chambers.site.release import open_signing_key
from tests.chambers.conftest import ROOT, execute, refused
from tests.chambers.site.deployment import FLOWER, documented

NAMES = ("coordinator.example.org", "10.0.0.5")


def write(capsys, folder, *words):
    return execute(capsys, "site", "coordinator", *words, "--folder", folder)


def renew(capsys, folder, *words):
    (folder / "server.pem").unlink()
    return write(capsys, folder, *words)


def handshake(folder, name, authority=None):
    """Connect over TLS to a server with the certificate in ``folder``, and verify the name."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=authority or folder / "authority.pem")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def accept():
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as connection:
            return connection.getpeercert()
    finally:
        ours.close()
        accepting.join()


def test_tls_accepts_the_names_and_the_loopback_ones(capsys, tmp_path):
    output = write(capsys, tmp_path, *NAMES)
    for name in ("coordinator.example.org", "10.0.0.5", "localhost", "127.0.0.1"):
        handshake(tmp_path, name)
        assert name in output
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'other\.example\.org'"):
        handshake(tmp_path, "other.example.org")
    for file in ("authority.key", "server.key", "instructions.key"):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600


def test_renewal_keeps_authority_and_names(capsys, tmp_path):
    write(capsys, tmp_path, *NAMES)
    authority = tmp_path / "at-the-institution.pem"
    authority.write_bytes((tmp_path / "authority.pem").read_bytes())
    instructions = (tmp_path / "instructions.key").read_bytes()
    before = handshake(tmp_path, "10.0.0.5")
    renew(capsys, tmp_path, *NAMES)
    assert (tmp_path / "instructions.key").read_bytes() == instructions
    after = handshake(tmp_path, "10.0.0.5", authority)
    assert after["serialNumber"] != before["serialNumber"]
    assert set(after["subjectAltName"]) == set(before["subjectAltName"])
    renew(capsys, tmp_path, "new.example.org")
    handshake(tmp_path, "new.example.org", authority)


def test_a_new_authority_is_introduced_before_it_is_used(capsys, tmp_path):
    """Run the commands of docs/operations.md."""
    write(capsys, tmp_path, *NAMES)
    old = tmp_path / "at-the-institution.pem"
    old.write_bytes((tmp_path / "authority.pem").read_bytes())
    introduce, change = documented("Renew the certificate authority")
    environment = os.environ | FLOWER | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-ec", introduce], cwd=tmp_path, env=environment, check=True)
    both = tmp_path / "both.pem"
    handshake(tmp_path, "localhost", old)
    handshake(tmp_path, "localhost", both)
    subprocess.run(["bash", "-ec", change], cwd=tmp_path, env=environment, check=True)
    handshake(tmp_path, "localhost", both)
    handshake(tmp_path, "localhost", tmp_path / "authority.pem")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(tmp_path, "localhost", old)


def test_only_the_authority_can_sign_and_both_expire(capsys, tmp_path):
    write(capsys, tmp_path, *NAMES)
    now = datetime.now(UTC)
    for name, days, signs, depth in (("authority", 3651, True, 0), ("server", 365, False, None)):
        certificate = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes())
        # It is valid a day early, for machines whose clocks are slow.
        dates = {-1: certificate.not_valid_before_utc, days: certificate.not_valid_after_utc}
        for after, date in dates.items():
            assert abs(date - now - timedelta(days=after)) < timedelta(minutes=5)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert (constraints.value.ca, constraints.value.path_length) == (signs, depth)
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        assert (usage.key_cert_sign, usage.digital_signature) == (signs, not signs)


def test_a_certificate_may_be_valid_for_ten_years(tmp_path):
    open_authority(tmp_path).issue(tmp_path, NAMES, 3650)
    handshake(tmp_path, "10.0.0.5")


def test_a_second_run_completes_and_changes_no_file(capsys, tmp_path):
    write(capsys, tmp_path, *NAMES)
    (tmp_path / "run.toml").write_text("rounds = 2\n")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    nginx = tmp_path / "nginx.conf"
    nginx.unlink()
    assert f"{tmp_path / 'run.toml'} is not changed" in write(capsys, tmp_path, *NAMES)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    for name, mode in (("state", 0o700), ("database", 0o700), ("superexec.secret", 0o600)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    # Nothing is left of the templates' paths.
    for file, content in before.items():
        assert b"/srv/chambers" not in content and b"/opt/chambers" not in content, file


def test_a_renewal_keeps_the_model(capsys, tmp_path):
    write(capsys, tmp_path, *NAMES, "--model", "smollm2")
    assert "not changed" not in renew(capsys, tmp_path, *NAMES)


def test_refusals_name_the_cure(capsys, tmp_path):
    command = ("site", "coordinator", "--folder", tmp_path)
    for name in ("https://a.example.org", "a.example.org:443", "a b", ""):
        assert "must be a host name" in refused(capsys, *command, name)
    assert "there is no such file or folder" in refused(capsys, *command, *NAMES, "--model", "none")
    spaced = tmp_path / "a b"
    assert "only letters" in refused(capsys, "site", "coordinator", "a", "--folder", spaced)
    assert not list(tmp_path.iterdir())
    write(capsys, tmp_path, *NAMES)
    assert "is not valid for b.example.org" in refused(capsys, *command, *NAMES, "b.example.org")
    server = tmp_path / "server.pem"
    server.unlink()
    open_authority(tmp_path / "old", new_days=364)
    short = "site", "coordinator", *NAMES, "--folder", tmp_path / "old"
    assert "create a new authority" in refused(capsys, *short)
    key = tmp_path / "authority.key"
    kept = key.read_bytes()
    key.write_bytes((tmp_path / "server.key").read_bytes())
    assert "is not the key of" in refused(capsys, *command, *NAMES)
    key.write_text("not a key")
    assert "is not a private key in PEM format" in refused(capsys, *command, *NAMES)
    key.unlink()
    assert f"{key} is missing" in refused(capsys, *command, *NAMES)
    key.write_bytes(kept)
    write(capsys, tmp_path, *NAMES)
    server.write_text("not a certificate")
    assert "is not a certificate in PEM format" in refused(capsys, *command, *NAMES)
    server.unlink()
    public = tmp_path / "instructions.pub"
    line = public.read_text()
    public.unlink()  # as if the first command had been killed
    write(capsys, tmp_path, *NAMES)
    assert public.read_text() == line
    server.unlink()
    open_signing_key(tmp_path / "reviewer" / "other")
    (tmp_path / "reviewer" / "other.pub").rename(public)
    assert "is not the public half of" in refused(capsys, *command, *NAMES)
    public.write_text("not a key")
    assert "is not an Ed25519 public key" in refused(capsys, *command, *NAMES)
    public.write_text(line)
    write(capsys, tmp_path, *NAMES)
