"""The site file decides what an institution's processes do, and Flower's context doesn't."""

import os
import sys
from pathlib import Path

import pytest

from federation.messages import CONFIG
from federation.site_file import VARIABLE, own_settings, read_own_policy, read_site_file
from federation.site_policy import PolicyError, read_policy
from tests.site_files import write_site


@pytest.fixture
def file(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.touch(mode=0o644)
    return write_site(tmp_path, "court", tmp_path / "data", policy=policy)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("policy =", "polciy =", "polciy: unknown key"),
        ('name = "court"', "", "name: Field required"),
        ('"court"', '"../court"', "name: must be at most 64 letters"),
        ("data-path", "# data-path", "data-path: Field required"),
        ('data-path = "/', 'data-path = "', "data-path: must be an absolute path"),
        ("policy =", 'policy = ""\n#', "policy: must be an absolute path"),
        ("policy =", "policy = false\n#", "policy: must be text, in quotation marks"),
        ("policy.toml", "missing.toml", "missing.toml can't be read: No such file"),
        ("name", "name = ", "is not TOML"),
    ],
)
def test_a_mistake_is_named_and_never_means_no_policy(file, before, after, said):
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, after))
    with pytest.raises(PolicyError) as error:
        read_site_file(file)
    assert said in str(error.value)


def test_files_may_begin_with_a_byte_order_mark(file):
    policy = file.parent / "policy.toml"
    policy.write_text("max-rounds = 3\n", encoding="utf-8-sig")
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert read_site_file(file).name == "court"
    assert read_policy(str(policy)).max_rounds == 3


@pytest.mark.parametrize("which", ["site.toml", "policy.toml", "."])
@pytest.mark.parametrize("mode", [0o646, 0o666, 0o777])
def test_a_file_that_any_user_can_change_is_refused(file, which, mode):
    path = file.parent / which
    path.chmod(mode | path.stat().st_mode)
    with pytest.raises(PolicyError, match="other users can change") as error:
        read_site_file(file)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("table", ["", "[sums]\nmembers = '/m'\nkey = '/k'\n"])
def test_a_policy_whose_keys_any_user_can_change_is_refused(tmp_path, table):
    policy, key = tmp_path / "policy.toml", tmp_path / "keys.pub"
    policy.write_text(f"{table}{'reviewers' if table else 'instruction-key'} = '{key}'\n")
    key.touch(mode=0o644)
    assert read_own_policy(str(policy)) == read_policy(str(policy))
    key.chmod(0o646)
    with pytest.raises(PolicyError, match=f"other users can change {key}"):
        read_own_policy(str(policy))


def test_the_sticky_bit_lets_only_owners_replace_files(file):
    file.parent.chmod(0o1777)
    assert read_site_file(file).name == "court"
    file.chmod(0o1646)
    with pytest.raises(PolicyError, match="other users can change"):
        read_site_file(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("which", ["site.toml", "policy.toml"])
def test_owner_and_group_must_be_root_or_the_process_s(file, which):
    path = file.parent / which
    path.chmod(0o664)
    assert read_site_file(file).name == "court"
    os.chown(path, 0, 65534)
    with pytest.raises(PolicyError, match="other users can change"):
        read_site_file(file)
    path.chmod(0o644)
    assert read_site_file(file).name == "court"
    os.chown(path, 65534, 0)
    with pytest.raises(PolicyError, match="other users can change"):
        read_site_file(file)


def test_in_a_deployment_the_file_is_required_and_decides(file, monkeypatch):
    simulated = {"partition-id": 0, "num-partitions": 2}
    monkeypatch.delenv(VARIABLE, raising=False)
    assert own_settings(simulated, deployed=False) == simulated
    with pytest.raises(PolicyError, match=f"{VARIABLE} of this institution's SuperExec"):
        own_settings(simulated, deployed=True)
    monkeypatch.setenv(VARIABLE, "site.toml")
    with pytest.raises(PolicyError, match="must be an absolute path"):
        own_settings({}, deployed=False)
    monkeypatch.setenv(VARIABLE, str(file))
    folder = file.parent
    expected = {"name": "court", "data-path": str(folder / "data")}
    expected["policy"] = str(folder / "policy.toml")
    assert own_settings(simulated, deployed=False) == expected


@pytest.mark.parametrize(
    "node",
    [
        {"partition-id": 0, "num-partitions": 2},
        {"policy": "/tmp/policy.toml"},
        {"name": "tribunal"},
        {"worker": "/tmp/worker.sock"},
        {"data-path": "/etc"},
    ],
    ids=lambda node: next(iter(node)),
)
def test_a_node_config_that_differs_is_refused_and_logged(site, monkeypatch, node):
    """As if another user of the machine had replaced Flower's context."""
    own = dict(site.node)
    file = write_site(site.folder, "court", Path(own["data-path"]), policy=own["policy"])
    monkeypatch.setenv(VARIABLE, str(file))
    site.node = {}
    assert "problem" not in site.ask("query").content[CONFIG]
    site.node = own
    assert "problem" not in site.ask("query").content[CONFIG]
    site.node = node
    for kind in ("query", "train", "evaluate"):
        reply = site.ask(kind)
        problem = site.problem(reply)
        assert reply.content[CONFIG]["name"] == "court"
        assert "Flower's node config differs from the site file" in problem
        assert site.lines("refused")[-1]["problem"] == problem


def test_without_a_site_file_everything_is_refused(site, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/flwr-clientapp", "--insecure"])
    for node in (dict(site.node), {"partition-id": 0, "num-partitions": 2}):
        site.node = node
        assert VARIABLE in site.refusal("train")
