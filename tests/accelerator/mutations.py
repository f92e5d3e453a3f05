"""Drop each conversion to a device, one at a time, and see whether a test notices.

    python -m tests.accelerator.mutations [TEXT]

A conversion is a call that moves a tensor, or the ``device=`` of a new one, in the code of both
methods. Each is dropped in a fork of a process that has imported all libraries, so it takes
seconds. TEXT selects conversions whose place or code contains it.
"""

import ast
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from tempfile import TemporaryFile
from types import CodeType
from typing import Any

import pytest

from tests.accelerator.device import install

_ROOT = Path(__file__).parents[2]
_FUNCTIONS = {"to_device", "to_device_together", "send_to_device"}
# Files whose tensors never leave the CPU, and the file that defines these functions.
_EXCEPT = {
    "finetuning/conversion",
    "finetuning/devices.py",
    "finetuning/evaluation/bertscore.py",
    "finetuning/model/fingerprint.py",
    "finetuning/model/gguf_file.py",
    "finetuning/model/tiny.py",
    "split/model/checkpoint.py",
    "split/model/exactness.py",
    "split/model/miniature.py",
    "split/protocol",
}
_SECONDS = 600
# Some conversions are redundant with the tests' models, such as those of parts without blocks.
_UNNOTICED_SHARE = 0.1
_LIBRARIES = (
    "accelerate",
    "datasets",
    "peft",
    "transformers.generation",
    "transformers.models.llama",
)


@dataclass(frozen=True, order=True)
class Conversion:
    """A conversion in a file of the project, identified by the position where its code ends."""

    file: str
    line: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def conversions() -> list[Conversion]:
    """List the conversions of the project, in the order of files and lines."""
    found = []
    for folder in ("finetuning", "split"):
        for path in (_ROOT / folder).rglob("*.py"):
            file = str(path.relative_to(_ROOT))
            if any(file.startswith(each) for each in _EXCEPT):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and without_conversion(node) is not None:
                    found.append(Conversion(file, node.lineno, _end(node), ast.unparse(node)))
    return sorted(found)


def without_conversion(call: ast.Call) -> ast.expr | None:
    """Return a call without its conversion; None if it neither is nor contains one."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in _FUNCTIONS:
        return call.args[0]
    if isinstance(function, ast.Attribute) and function.attr == "cpu":
        return function.value
    if isinstance(function, ast.Attribute) and function.attr == "to" and call.args:
        if "type" in ast.unparse(call.args[0]):
            return None
        if any(keyword.arg == "copy" for keyword in call.keywords):
            return ast.Call(ast.Attribute(function.value, "clone", ast.Load()), [], [])
        return function.value
    kept = [
        keyword
        for keyword in call.keywords
        # A constant device is not a conversion.
        if keyword.arg != "device" or isinstance(keyword.value, ast.Constant)
    ]
    return None if len(kept) == len(call.keywords) else ast.Call(function, call.args, kept)


def _end(call: ast.Call) -> int:
    return (call.end_lineno or 0) * 1000 + (call.end_col_offset or 0)


class _Dropping(ast.NodeTransformer):
    """Drop one conversion from a file's code."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion

    def visit_Call(self, node: ast.Call) -> ast.AST:
        wanted = (self._conversion.line, self._conversion.end)
        if (node.lineno, _end(node)) == wanted and ast.unparse(node) == self._conversion.text:
            return without_conversion(node) or node
        return self.generic_visit(node)


class _Importer:
    """Import a conversion's file without the conversion."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self._name = conversion.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._conversion)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, conversion: Conversion) -> None:
        super().__init__(name, path)
        self._conversion = conversion

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        changed = ast.fix_missing_locations(_Dropping(self._conversion).visit(tree))
        return compile(changed, self.path, "exec")


def failure(conversion: Conversion | None) -> str:
    """Describe in a line how the tests fail without a conversion; empty if they pass."""
    in_split = conversion is not None and conversion.file.startswith("split/")
    tests = ["-k", "split or noise"] if in_split else []
    with TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(_SECONDS)
            if conversion is not None:
                sys.meta_path.insert(0, _Importer(conversion))  # type: ignore[arg-type]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.accelerator.plugin"]
            files = [f"tests/accelerator/test_{name}.py" for name in ("methods", "waits")]
            os._exit(pytest.main([*options, *tests, *files]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if status == 0:
        return ""
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return told[0] if told else f"exit status {status}"


def main(arguments: Sequence[str]) -> int:
    """Print how tests fail without each conversion; return 0 if enough are noticed."""
    install()
    for name in _LIBRARIES:
        importlib.import_module(name)
    chosen = [each for each in conversions() if all(text in str(each) for text in arguments)]
    files = {each.file.removesuffix(".py").replace("/", ".") for each in chosen}
    assert not files & set(sys.modules), "imported files can't be changed"
    started = time.monotonic()
    unnoticed = 0
    with ThreadPoolExecutor(2) as pool:
        everything = pool.submit(failure, None)
        for conversion, told in zip(chosen, pool.map(failure, chosen), strict=True):
            print(f"{conversion}\n  {told or 'UNNOTICED'}", flush=True)
            unnoticed += not told
    seconds = time.monotonic() - started
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed in {seconds:.0f} s", flush=True)
    if everything.result():
        print(f"without a mutation: {everything.result()}")
    return int(unnoticed > len(chosen) * _UNNOTICED_SHARE or bool(everything.result()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
