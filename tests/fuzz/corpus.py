"""The corpus of each target: a file with an input in base64 in each line, the shortest first."""

import importlib.util
import sys
from base64 import b64decode, b64encode
from pathlib import Path

from tests.fuzz.targets import TARGETS

FOLDER = Path(__file__).parent / "corpus"
# Maximum size of all inputs of a target.
MAX_BYTES = 16_000
_FOLLOWED = tuple(
    str(Path(importlib.util.find_spec(package).origin).parent)
    for package in (
        "chambers",
        "client_app",
        "federation",
        "finetuning",
        "gguf",
        "split",
        "strategies",
    )
)


def read(name):
    return [b64decode(line) for line in (FOLDER / f"{name}.txt").read_text().splitlines()]


def write(name, inputs):
    (FOLDER / f"{name}.txt").write_text("".join(f"{b64encode(data).decode()}\n" for data in inputs))


def extended(name, kept, found):
    """Return the kept inputs, and the shortest found inputs that reach new branches."""
    reached = set().union(*(branches(TARGETS[name], data) for data in kept))
    size = sum(map(len, kept))
    for data in sorted(set(found), key=lambda data: (len(data), data)):
        more = branches(TARGETS[name], data)
        if not more <= reached and size + len(data) <= MAX_BYTES:
            reached |= more
            size += len(data)
            kept = [*kept, data]
    return sorted(set(kept), key=lambda data: (len(data), data))


def branches(target, data):
    """Return the transitions between lines that a target executes in this project and in gguf."""
    reached = set()

    def trace(frame, _event, _argument):
        if not frame.f_code.co_filename.startswith(_FOLLOWED):
            return None
        code, before = frame.f_code, 0

        def step(frame, event, _argument):
            nonlocal before
            if event == "line":
                reached.add((code.co_filename, code.co_name, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        reached.add(("", "", 0, target(data)))
    finally:
        sys.settrace(previous)
    return reached
