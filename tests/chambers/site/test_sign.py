"""Signed releases as Flower fetches and verifies them; several reviewers; careless input."""

import hashlib
import json
import shutil

import pytest
import requests
import yaml
from flwr.cli.build import build_fab_from_files
from flwr.supercore.fab import Fab
from flwr.supercore.utils import request_download_link
from flwr.superlink.servicer.control.control_handlers import _format_verification
from flwr.supernode.start_client_internal import _verify_fab

from chambers.site.keys import open_node_key, open_peer_key
from chambers.site.release import open_signing_key
from federation.sums.members import SumError, read_signed_members
from tests.chambers.conftest import execute, refused
from tests.chambers.site.deployment import APP, serving


def build(file, **changed):
    file.write_bytes(build_fab_from_files(APP | changed)[0])
    return file


def reviewer(folder):
    """Make a signing key; return the trusted entities of a site that trusts the key."""
    open_signing_key(folder / "key")
    return yaml.safe_load((folder / "trusted.yaml").read_text())


def sign(capsys, release, key, output, *words):
    return execute(capsys, "site", "sign", release, "--key", key, "--output", output, *words)


def fetch(url):
    """Fetch the release as a SuperLink does, for its SuperNodes."""
    location, verifications, _ = request_download_link(
        "@courts/tiny", "1.0.0", f"{url}/hub/fetch-fab", "fab_url"
    )
    content = requests.get(location, timeout=10).content
    return Fab(hashlib.sha256(content).hexdigest(), content, _format_verification(verifications))


@pytest.fixture
def release(tmp_path):
    return build(tmp_path / "tiny.fab")


def test_a_site_accepts_only_what_its_reviewer_signed(capsys, release, tmp_path):
    alice, bob = (reviewer(tmp_path / name) for name in ("alice", "bob"))
    folder = tmp_path / "release"
    folder.mkdir()
    with serving(folder) as url:
        output = sign(capsys, release, tmp_path / "alice" / "key", folder, "--url", url)
        assert "@courts/tiny==1.0.0, signed by" in output
        fab = fetch(url)
        assert fab.content == release.read_bytes()
        assert _verify_fab(fab, alice)
        assert not _verify_fab(fab, bob)
        # A signature under another reviewer's name is refused.
        assert not _verify_fab(fab, dict.fromkeys(alice, *bob.values()))
        # The coordinator changes the code, and keeps the signatures.
        (served,) = folder.glob("*.fab")
        build(served, **{"tiny.py": APP["tiny.py"] + b"print(1)"})
        assert not _verify_fab(fetch(url), alice)


def test_reviewers_add_their_signatures_to_one_release(capsys, release, tmp_path):
    alice, bob = (reviewer(tmp_path / name) for name in ("alice", "bob"))
    folder = tmp_path / "release"
    folder.mkdir()
    with serving(folder) as url:
        for name in ("alice", "bob", "alice"):
            sign(capsys, release, tmp_path / name / "key", folder, "--url", url)
        assert _verify_fab(fetch(url), alice) and _verify_fab(fetch(url), bob)
        # A different release has none of the first one's signatures, even if an earlier command
        # was killed after it had written the release.
        build(release, **{"tiny.py": APP["tiny.py"] + b"print(1)"})
        digest = hashlib.sha256(release.read_bytes()).hexdigest()
        shutil.copy(release, folder / f"{digest}.fab")
        sign(capsys, release, tmp_path / "bob" / "key", folder, "--url", url)
        fab = fetch(url)
        assert fab.content == release.read_bytes()
        assert _verify_fab(fab, bob) and not _verify_fab(fab, alice)
        assert len(list(folder.iterdir())) == 2
        (verification,) = json.loads((folder / "fetch-fab.json").read_text())["verifications"]
        assert verification["public_key_id"] in bob


def test_a_list_of_groups_is_signed_for_who_trusts_the_reviewer(capsys, tmp_path):
    names = ["court", "firm", "hospital"]
    publics = {name: open_peer_key(tmp_path / name) for name in names}
    reviewer(tmp_path / "reviewer")
    file, trusted = tmp_path / "members.json", tmp_path / "reviewer" / "trusted.yaml"
    file.write_text(json.dumps({"groups": [{n: publics[n].read_text() for n in names}]}))
    with pytest.raises(SumError, match="is not signed by a reviewer"):
        read_signed_members(file, trusted)
    words = ["site", "sign", "--members", file, "--key", tmp_path / "reviewer" / "key"]
    output = execute(capsys, *words)
    for name in names:
        assert hashlib.sha256(publics[name].read_bytes()).hexdigest() in output
    assert read_signed_members(file, trusted).group_of("firm") == names
    content = json.loads(file.read_text())
    content["groups"].append({n: publics[n].read_text() for n in names})
    file.write_text(json.dumps(content))
    assert "a name occurs twice" in refused(capsys, *words)
    assert "name a folder with --output" in refused(capsys, "site", "sign", *words[-2:])


def test_refusals(capsys, release, tmp_path):
    reviewer(tmp_path)
    open_node_key(tmp_path / "node")
    folder = tmp_path / "release"

    def attempt(release, key, *words):
        return refused(capsys, "site", "sign", release, "--key", key, "--output", folder, *words)

    assert "can't be read" in attempt(tmp_path / "none.fab", tmp_path / "key")
    assert "not a release made by flwr build" in attempt(tmp_path / "key", tmp_path / "key")
    for key in ("node", "key.pub"):
        assert "is not a signing key" in attempt(release, tmp_path / key)
    assert "must begin with http" in attempt(release, tmp_path / "key", "--url", "127.0.0.1:8002")
    assert not folder.exists()
    # A mistyped name doesn't make another key.
    assert "trusted.yaml exists" in attempt(release, tmp_path / "kye")
    trusted = (tmp_path / "trusted.yaml").read_text()
    (tmp_path / "trusted.yaml").unlink()  # as if the first command had been killed
    assert open_signing_key(tmp_path / "key")
    assert (tmp_path / "trusted.yaml").read_text() == trusted
    assert not folder.exists()
    sign(capsys, release, tmp_path / "key", folder)
    (folder / "fetch-fab.json").write_text("{}")
    assert "sign the release again" in attempt(release, tmp_path / "key")
    shutil.rmtree(folder)
    sign(capsys, release, tmp_path / "key", folder)
