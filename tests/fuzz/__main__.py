"""Fuzz the targets with atheris, and store inputs that reach new branches.

python -m tests.fuzz --minutes 5 [TARGET…]

Each target runs in a separate process. A fault ends the command: the traceback is printed, and the
input is added to the corpus, so that the corpus test fails until the fault is corrected.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_LONGEST = 4096  # bytes of an input
_SECONDS_EACH = 20
_PACKAGES = ["chambers", "client_app", "federation", "finetuning", "gguf", "split", "strategies"]


def fuzz(name, minutes, folder):
    """Fuzz one target in this process, which libFuzzer exits."""
    import atheris

    with atheris.instrument_imports(include=_PACKAGES):
        from tests.fuzz.targets import TARGETS
    options = [
        f"-max_total_time={round(60 * minutes)}",
        f"-max_len={_LONGEST}",
        f"-timeout={_SECONDS_EACH}",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={folder}/fault-",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], TARGETS[name])
    atheris.Fuzz()


def run(name, minutes):
    """Fuzz one target in a subprocess, and write its corpus; return whether there was no fault."""
    from tests.fuzz.corpus import extended, read, write

    with TemporaryDirectory() as folder:
        for number, data in enumerate(before := read(name)):
            Path(folder, f"kept-{number}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz", name, f"--minutes={minutes}"]
        code = subprocess.run([*command, f"--folder={folder}"], check=False).returncode
        files = list(Path(folder).iterdir())
        faults = [file.read_bytes() for file in files if file.name.startswith("fault-")]
        if code or faults:
            write(name, [*before, *faults])
            return False
        kept = extended(name, before, [file.read_bytes() for file in files])
    write(name, kept)
    print(f"{name}: {len(kept)} inputs, {len(set(kept) - set(before))} of them new", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all if none is named")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("it needs atheris: pip install -e '.[fuzz]'")
    if arguments.folder:
        fuzz(arguments.targets[0], arguments.minutes, arguments.folder)
    from tests.fuzz.targets import TARGETS

    results = [run(name, arguments.minutes) for name in arguments.targets or TARGETS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
