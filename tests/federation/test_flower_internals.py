"""Flower's private modules are imported only by one file, and by what corrects its programs."""

import ast
import importlib
from pathlib import Path

from chambers.app_folder import app_files

ROOT = Path(__file__).parent.parent.parent
LIST = ROOT / "federation" / "flower_internals.py"
DOCUMENTED = (
    "flwr.app",
    "flwr.clientapp",
    "flwr.common",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
)
FILES = sorted(
    file
    for package in ("chambers", *{name.split("/")[0] for name in app_files() if "/" in name})
    for file in (ROOT / package).rglob("*.py")
    if file != LIST and file.parent != ROOT / "chambers" / "flower"
)


def imports_from_flower(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("flwr"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_private_modules_are_imported_in_one_file():
    found = {(file, *pair) for file in FILES for pair in imports_from_flower(file)}
    assert len(found) > 20
    private = {
        (str(file.relative_to(ROOT)), module, name)
        for file, module, name in found
        if module not in DOCUMENTED or name not in importlib.import_module(module).__all__
    }
    assert not private


def test_what_is_listed_is_used():
    imports = [n for n in ast.parse(LIST.read_text()).body if isinstance(n, ast.ImportFrom)]
    of_flower = [node for node in imports if (node.module or "").startswith("flwr")]
    names = {alias.asname or alias.name for node in of_flower for alias in node.names}
    text = "\n".join(file.read_text() for file in FILES)
    assert not [name for name in sorted(names) if name not in text]
