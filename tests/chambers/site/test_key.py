"""``chambers site key``: it writes a key that Flower can read, and never overwrites a key."""

import argparse
import stat

from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from tests.chambers.conftest import refused, told


def test_flower_reads_both_halves(capsys, tmp_path):
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    file = tmp_path / "node"
    output = told(capsys, "site", "key", file)
    assert "flwr supernode register node.pub deployment" in output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    options = argparse.Namespace(
        auth_supernode_private_key=str(file), auth_supernode_public_key=None
    )
    _, public = _try_setup_client_authentication(options)
    assert try_load_public_key(tmp_path / "node.pub") == public_key_to_bytes(public)


def test_existing_keys_stay(capsys, tmp_path):
    file, public = tmp_path / "node", tmp_path / "node.pub"
    told(capsys, "site", "key", file)
    kept = file.read_bytes()
    assert f"{file} exists" in refused(capsys, "site", "key", file)
    assert file.read_bytes() == kept
    file.unlink()
    assert f"{public} exists" in refused(capsys, "site", "key", file)
    assert not file.exists()
