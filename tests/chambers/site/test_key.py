"""Node keys: Flower can read them, and they are never overwritten."""

import argparse
import hashlib
import stat

import pytest
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from chambers.errors import CommandError
from chambers.site.keys import hash_node_key, open_node_key, read_node_public_key


def test_flower_reads_both_halves(tmp_path):
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    file = tmp_path / "node"
    open_node_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    options = argparse.Namespace(
        auth_supernode_private_key=str(file), auth_supernode_public_key=None
    )
    _, public = _try_setup_client_authentication(options)
    assert try_load_public_key(tmp_path / "node.pub") == public_key_to_bytes(public)
    # The digest in lists of nodes is that of the file.
    written = (tmp_path / "node.pub").read_bytes()
    assert (
        hash_node_key(read_node_public_key(tmp_path / "node.pub"))
        == hashlib.sha256(written).hexdigest()
    )


def test_existing_keys_stay(tmp_path):
    file, public = tmp_path / "node", tmp_path / "node.pub"
    open_node_key(file)
    kept = file.read_bytes(), public.read_bytes()
    public.unlink()
    file.chmod(0o640)
    with pytest.raises(CommandError, match="can be read by other users: chmod 600"):
        open_node_key(file)
    file.chmod(0o600)
    open_node_key(file)
    assert (file.read_bytes(), public.read_bytes()) == kept
    file.unlink()
    with pytest.raises(CommandError, match="exists"):
        open_node_key(file)
    assert not file.exists() and public.read_bytes() == kept[1]
