"""A wheel that is installed without a checkout can train and sign its release."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
SCRIPT = "#!{python}\nfrom {module} import {function}\n\n{function}()\n"


def build(source, folder):
    """Build the sdist and the wheel from a checkout or an unpacked sdist."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Install the wheel into an environment with this one's libraries; return its bin folder."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install"]
    subprocess.run([*command, "--no-deps", "--no-index", built[1]], check=True)
    # This file adds the libraries, but not the checkouts that they point to.
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    for point in distribution("flwr").entry_points.select(group="console_scripts"):
        script = folder / "bin" / point.name
        values = {"python": python, "module": point.module, "function": point.attr}
        script.write_text(SCRIPT.format_map(values))
        script.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def run(installed, tmp_path):
    """Return a function that runs a program of the environment in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(name, *words):
        result = subprocess.run(
            [installed / name, *map(str, words)],
            cwd=folder,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-3000:]
        return result.stdout

    return run


def test_the_sdist_gives_the_same_wheel(built, tmp_path):
    sdist, wheel = built
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    (source,) = tmp_path.iterdir()
    assert contents(build(source, tmp_path / "dist")[1]) == contents(wheel)


def test_the_installed_package_trains(run, tmp_path, checkpoint, client_folders):
    where = run("python", "-c", "import chambers, server_app; print(chambers, server_app)")
    assert where.count("site-packages") == 2
    # The pages that help and errors name are installed, too.
    docs = "".join(run("chambers", "--help").split()).rpartition("docsis")[2].rstrip(".")
    assert (Path(docs) / "deployment.md").is_file()
    run(
        *("chambers", "train", "fedjudge", "rounds=1", "train.local-steps=1"),
        *("evaluate.generate=false", f"model.name={checkpoint}", f"data.path={client_folders}"),
        *("output-dir=runs", "state-path=state"),
    )
    (folder,) = (tmp_path / "empty" / "runs").iterdir()
    assert (folder / "adapters" / "global" / "adapter_model.safetensors").is_file()
    assert (folder / "report.html").is_file()


def test_the_installed_package_signs_the_release(run, tmp_path):
    shown = run("chambers", "site", "sign", "--key", "reviewer/key", "--output", "release")
    assert "release: @chambers/chambers==" in shown
    (file,) = (tmp_path / "empty" / "release").glob("*.fab")
    assert file.read_bytes() == build_fab_from_disk(ROOT)


def test_the_installed_package_sets_up_hosts(run, tmp_path):
    run("chambers", "site", "coordinator", "coordinator.example.org")
    folder = tmp_path / "empty"
    (unit,) = (folder / "systemd").glob("*superlink*")
    assert f"WorkingDirectory={folder}" in unit.read_text()


def repack(installed, folder):
    """Make a wheel of an installed distribution, as `pip wheel` would download it."""
    tag = installed.read_text("WHEEL").split("Tag: ")[-1].split()[0]
    name = f"{installed.name.replace('-', '_')}-{installed.version}-{tag}.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in installed.files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(file.locate(), str(file))


@pytest.mark.nightly
def test_the_package_installs_and_trains_without_a_network(
    built, tmp_path, checkpoint, client_folders
):
    enter = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted")
    wheels, folder = tmp_path / "wheels", tmp_path / "environment"
    wheels.mkdir()
    for each in distributions(path=[sysconfig.get_path("purelib")]):
        if each.name != "chambers":
            repack(each, wheels)
    shutil.copy(built[1], wheels)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    options = ("--no-index", "--find-links", wheels, "--no-compile")
    install = [*enter, folder / "bin" / "pip", "install", *options, "chambers[privacy,tensorboard]"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(install, check=True, env=environment)
    chambers = [*enter, folder / "bin" / "chambers"]
    for words in (
        ["site", "coordinator", "localhost"],
        [
            *("train", f"model.name={checkpoint}", f"data.path={client_folders}", "rounds=1"),
            *("output-dir=runs", "state-path=state"),
        ],
    ):
        subprocess.run([*chambers, *words], check=True, env=environment, cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "adapters" / "global" / "adapter_model.safetensors").is_file()
    shutil.rmtree(wheels)
    shutil.rmtree(folder)
