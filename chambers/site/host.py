"""The folder of a host: its configuration files, and the environment of its programs."""

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from chambers.app_folder import TEMPLATES
from chambers.environment import bypass_proxies_locally
from chambers.errors import CommandError
from chambers.sources import option
from finetuning.files import write_file, write_secret
from finetuning.model.names import BUILT_IN, hub_id

# Where the proxy serves the signed release to the SuperLink; in containers, at another address.
HUB = os.environ.get("FLWR_SUPERGRID_API_URL", "http://127.0.0.1:8002")
# Names of files in the folder.
INSTITUTION, SITE, TRUSTED = "institution.env", "site.toml", "trusted.yaml"
# The folder for masked sums, with an institution's key and the list of groups.
SUMS, PEER, MEMBERS = "sums", "sums/peer", "sums/members.json"
_SECRET = "superexec.secret"
FOLDER_OPTION = option("Folder of the host; default: the current folder.", "FOLDER")
MODEL_OPTION = option("Base model of runs: a folder, a GGUF file, tiny or smollm2.", "PATH")


def open_folder(path: Path, model: str) -> Path:
    """Return the absolute path of a host's folder, created if missing; check the base model.

    Raise ``CommandError`` if units couldn't contain the path, or there is no such model here.
    """
    if model not in BUILT_IN and not Path(model).expanduser().exists():
        raise CommandError(f"--model {model}: there is no such file or folder on this machine")
    folder = _absolute(path)
    if not re.fullmatch(r"[\w./@+-]+", str(folder)):
        raise CommandError(
            f"--folder {folder}: the path may contain only letters, digits and ._-+@, because "
            "systemd's units contain it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_institution_name(name: str) -> None:
    """Raise ``CommandError`` unless a text can be the name of an institution."""
    from federation.names import is_name

    if not is_name(name):
        raise CommandError(f"--name {name}: use at most 64 letters, digits, '.', '_' and '-'")


def complete(folder: Path, files: Iterable[str], model: str, values: Mapping[str, str]) -> None:
    """Write missing files from the templates in ``docker/``, and what all hosts need.

    ``values`` are replacements of texts in the templates. The folder's ``model`` becomes a link to
    the base model, since a run names the model by the same path at each host.
    """
    if not (folder / _SECRET).exists():
        write_secret(folder / _SECRET, secrets.token_bytes(32))
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    (folder / SUMS).mkdir(exist_ok=True)
    if model in BUILT_IN:
        permitted = f'hub-models = ["{hub_id(model)}"]'
        values = {
            'paths = ["/srv/chambers/model"]': permitted,
            "/srv/chambers/model": model,
            **values,
        }
    else:
        link(folder / "model", Path(model))
    for file in files:
        target, text = folder / file, render_template(folder, file, values)
        if not target.exists():
            write_file(target, text)
        elif target.read_text(encoding="utf-8") != text:
            print(f"{target} is not changed; for a new one, delete it and run this again")


def render_template(folder: Path, file: str, values: Mapping[str, str]) -> str:
    """Return the content of a file of a host, from its template; ``values`` as in ``complete``."""
    # The template of state/.flwr/config.toml is config.toml.
    text = (TEMPLATES / file.removeprefix("state/.flwr/")).read_text(encoding="utf-8")
    values = {
        **values,
        "/srv/chambers": str(folder),
        "/opt/chambers/bin": str(Path(sys.executable).parent),
        "/usr/sbin/nginx": _nginx(),
    }
    for old, new in values.items():
        text = text.replace(old, new)
    if "daemon off;" in text:  # the proxy's unit
        text = text.replace("daemon off;", f"{stream_module()}daemon off;")
    return text


def _nginx() -> str:
    return shutil.which("nginx") or "/usr/sbin/nginx"


def stream_module() -> str:
    """Return the directive that loads nginx's stream module, if the module is a separate file."""
    if not shutil.which(_nginx()):
        return ""
    built = subprocess.run([_nginx(), "-V"], stderr=subprocess.PIPE, text=True, check=False).stderr
    folder = re.search(r"--modules-path=(\S+)", built)
    file = Path(folder[1] if folder else "/", "ngx_stream_module.so")
    return f"load_module {file}; " if "--with-stream=dynamic" in built and file.exists() else ""


def link(path: Path, target: Path) -> None:
    """Create or change a link in a host's folder, unless the target has this path already."""
    target = _absolute(target)
    if path != target:
        if path.exists() and not path.is_symlink():
            raise CommandError(f"{path} is not a link: move it, or name it as --{path.name}")
        path.unlink(missing_ok=True)
        path.symlink_to(target)


def print_digests(*files: Path) -> None:
    """Print each file's SHA-256 digest, which people compare by telephone."""
    for file in files:
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")


def read_environment(file: Path) -> dict[str, str]:
    """Read a file of environment variables as systemd and Compose do."""
    lines = file.read_text("utf-8-sig").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def enter(folder: Path) -> None:
    """Take over the environment of a host's programs and, if this is root, their user.

    Otherwise, the programs couldn't change the files that this process creates.
    """
    state, file = folder / "state", folder / "flower.env"
    if not state.is_dir():
        raise CommandError(
            f"{folder.absolute()} is not a host's folder, which chambers site coordinator or join "
            "writes: change to that folder, or name it"
        )
    owner = state.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    path["FLWR_HOME"] = str(state.absolute() / ".flwr")
    # In a container, Compose has read the file.
    environment = {**os.environ, **(read_environment(file) if file.exists() else {}), **path}
    os.environ.clear()
    os.environ.update(bypass_proxies_locally(environment))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - links are not resolved
