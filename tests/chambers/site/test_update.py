"""``chambers site update``: the files of an institution that an earlier version has set up."""

import os
import socket

import pytest

from chambers.__main__ import main
from chambers.site.check import who_reaches
from federation.site_file import read_site_file
from tests.chambers.conftest import refused


@pytest.fixture
def court(tmp_path):
    for name in ("state", "systemd"):
        (tmp_path / name).mkdir()
    (tmp_path / "policy.toml").touch(mode=0o600)
    variables = f"COORDINATOR=coordinator:8443\nINSTITUTION=tribunal\nWORKER={tmp_path}/socket\n"
    (tmp_path / "institution.env").write_text(variables)
    unit = tmp_path / "systemd" / "chambers-supernode.service"
    unit.write_text("ExecStart=flower-supernode --node-config='name=\"tribunal\"'\n")
    return tmp_path


def test_units_are_replaced_and_the_site_file_is_written_once(court, capsys):
    assert main(["site", "update", str(court)]) == 0
    said = capsys.readouterr().out
    site = read_site_file(court / "site.toml")
    assert (site.name, site.data_path) == ("tribunal", f"{court}/data")
    assert (site.policy, site.worker) == (f"{court}/policy.toml", f"{court}/socket")
    unit = court / "systemd" / "chambers-supernode.service"
    assert "bin/chambers-supernode" in unit.read_text()
    assert "flower-supernode" in unit.with_name(f"{unit.name}.old").read_text()
    assert (
        f"CHAMBERS_SITE={court}/site.toml"
        in unit.with_name("chambers-clientapp.service").read_text()
    )
    for name in ("site.toml", "nftables.conf", "systemd/chambers-supernode.service"):
        assert f"{court / name} is new" in said
    (court / "site.toml").write_text("")
    assert main(["site", "update", str(court)]) == 0
    assert capsys.readouterr().out == "" and not (court / "site.toml").read_text()


def test_a_coordinator_gets_a_new_proxy_configuration(court, capsys):
    (court / "institution.env").unlink()
    (court / "nginx.conf").write_text("events {}\n")
    assert main(["site", "update", str(court)]) == 0
    assert f"{court}/nginx.conf is new" in capsys.readouterr().out
    assert "stream {" in (court / "nginx.conf").read_text()
    assert (court / "nginx.conf.old").read_text() == "events {}\n"
    assert not (court / "site.toml").exists()
    assert "is not a host's folder" in refused(capsys, "site", "update", court / "systemd")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_open_port_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert who_reaches(port) == "everybody"
    assert who_reaches(port) == "nobody"
