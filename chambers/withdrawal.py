"""``chambers withdraw``: repeat a run without an institution, as if it had never taken part."""

import hashlib
import json
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument, count, global_adapter, option, read_run
from federation.run_folder import (
    METRICS_FILE,
    WITHDRAWN,
    Event,
    checkpoint_files,
    read_events,
    read_status,
)
from finetuning.files import write_json

if TYPE_CHECKING:
    from federation.run_config import RunConfig

CERTIFICATE = "withdrawal.json"
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Withdraw:
    """Repeat a run without an institution.

    \b
      chambers withdraw court --run runs/2026-01-31_12-00-00_fedjudge-cl
      chambers withdraw court --run runs/… --coordinator /srv/chambers

    The result is the run that would have been, from the first round in which the institution took
    part. With keep-rounds=all, earlier rounds are used again. If the command is interrupted, repeat
    it. The new run's folder has a certificate, withdrawal.json, and the old one names it in
    withdrawn.json. What descends from the old run is listed: it still contains what was learnt.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    name: Annotated[str, argument("NAME")]
    run: Annotated[Path, option("Folder of the run.", "RUN")]
    coordinator: Annotated[
        Path | None, option("The coordinator's folder; default: a simulation.", "FOLDER")
    ] = None
    clients: Annotated[
        int | None, count("Number of simulated clients, if the run had --clients.")
    ] = None
    search: Annotated[
        list[Path] | None,
        option("More folders with adapters, merged models or runs; repeatable.", "FOLDER"),
    ] = None

    def __call__(self) -> int:
        """Train, and write the certificate; return 0 only if the new run completed."""
        from federation.run_config import RunConfig, parse_run_config

        run, search = self.run.absolute(), [each.absolute() for each in self.search or ()]
        coordinator = self.coordinator.absolute() if self.coordinator else None
        if coordinator:
            host.enter(coordinator)
        recorded = {**RunConfig().flat(), **read_run(run).config, "resume": ""}
        original = parse_run_config(recorded)
        events = read_events(run / METRICS_FILE)
        global_adapter(run)
        if (run / WITHDRAWN).exists():
            begun = json.loads((run / WITHDRAWN).read_bytes())
            new = run.with_name(begun["successor"])
            if begun["client"] != self.name:
                raise CommandError(f"{begun['client']} was withdrawn before: name --run {new}")
        else:
            if not coordinator:
                from chambers.settings import count_clients
                from chambers.train import check_clients

                check_clients(run, self.clients or count_clients(recorded), original)
            new = prepare(run, original, events, self.name)
        print(f"the run without {self.name}: {new}", file=sys.stderr)
        if any(event["event"] == "train" and "withheld" in event for event in events):
            text = "clients add noise (privacy.epsilon): their part is retrained, not identical"
            print(text, file=sys.stderr)
        values = {**read_run(new).config, "resume": str(new)}
        if read_status(new).phase != "completed" and (status := self._train(values, coordinator)):
            return status
        certify(run, new, self.name)
        for line in find_descendants(run, new, search):
            print(line)
        print(f"certificate: {new / CERTIFICATE}")
        return 0

    def _train(self, values: Mapping[str, Any], coordinator: Path | None) -> int:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.toml"
            file.write_text(tomli_w.dumps(dict(values)))
            if coordinator:
                from chambers.run import Run

                return Run([str(coordinator), str(file)])()
            from chambers.train import Train

            return Train([str(file)], self.clients)()


def first_round(events: Sequence[Event], name: str, config: "RunConfig") -> int:
    """Return the first round that an institution has influenced; 0 is before the first round.

    Raise ``CommandError`` if it has taken part in none.
    """
    rounds = [each["round"] for each in events if "round" in each and name in _named(each)]
    if not rounds:
        raise CommandError(f"{name} has taken no part in the run: see {METRICS_FILE}")
    # With ``sample``, its presence changes which others are drawn. Clients keep the state of an
    # optimizer for two rounds only, and models trained alone belong to the old lineage.
    is_separable = config.sample == 1 and config.train.optimizer_state == "reset"
    is_separable = is_separable and not config.evaluate.alone
    return min(rounds) if is_separable else 0


def _named(event: Event) -> Iterator[str]:
    yield str(event.get("client", ""))
    for key in ("participants", "clients"):
        yield from event.get(key, [])
    yield from (each["client"] for each in event.get("left_out", []))


def prepare(run: Path, config: "RunConfig", events: Sequence[Event], name: str) -> Path:
    """Create the folder of a run that is to be resumed without an institution."""
    from federation.run_folder import end_status
    from finetuning.model.locating import locate
    from server_app.checkpoint import RunCheckpoint, load_run_checkpoint, save_checkpoint
    from server_app.main import first_adapter
    from server_app.results import new_directory
    from strategies.journal import Progress

    others = {each for event in events for each in _named(event)} - {"", name}
    if not others:
        raise CommandError(f"{name} is the run's only client")
    if config.sums.enabled:
        raise CommandError(
            "groups of masked sums take part whole: the reviewer signs a list without "
            f"{name} (chambers site sign --members); then start a new run"
        )
    first, kept = first_round(events, name, config), checkpoint_files(run)
    numbers = [int(file.stem.removeprefix("round-")) for file in kept]
    lineage = uuid.uuid4().hex
    if first > 1 and first - 1 in numbers:
        before = load_run_checkpoint(run, first - 1)
        # The new run has no personalised adapters, which are of the old lineage.
        progress = replace(before.progress, lineage=lineage)
        start = replace(before, progress=progress, rounds={})
    else:
        state, _ = first_adapter(config, locate(config.model.name))
        start = RunCheckpoint(Progress(lineage=lineage), state, {}, {}, 0)
    without = config.model_copy(
        update={
            "exclude": ",".join(sorted({*config.excluded, name})),
            "min_nodes": max(1, min(config.min_nodes, len(others))),
        }
    )
    new = new_directory(config.model_copy(update={"output_dir": str(run.parent)}))
    for file in ("base-model.json", "versions.json"):
        (new / file).write_bytes((run / file).read_bytes())
    write_json(new / "config.json", without.flat())
    (new / METRICS_FILE).write_bytes((run / METRICS_FILE).read_bytes()[: start.metrics_bytes])
    save_checkpoint(new, start)
    end_status(new, f"not yet trained without {name}")
    write_json(run / WITHDRAWN, {"client": name, "successor": new.name, "time": _now()})
    return new


def certify(run: Path, new: Path, name: str) -> None:
    """Write the certificate of a withdrawal into the new run's folder."""
    from server_app.checkpoint import load_run_checkpoint

    before, after = (load_run_checkpoint(each).progress.lineage for each in (run, new))
    rounds = [e for e in read_events(new / METRICS_FILE) if e["event"] == "round"]
    old = [e for e in read_events(run / METRICS_FILE) if e["event"] == "round"]
    reused = [e["round"] for e in rounds if any(e == other for other in old)]
    write_json(
        new / CERTIFICATE,
        {
            "withdrawn": name,
            "time": _now(),
            "run": {"folder": run.name, "lineage": before, "adapter": _digest(run)},
            "successor": {"folder": new.name, "lineage": after, "adapter": _digest(new)},
            "rounds used again": reused,
            "rounds repeated": [e["round"] for e in rounds if e["round"] not in reused],
            "participants": {str(e["round"]): e["participants"] for e in rounds},
            "versions": json.loads((new / "versions.json").read_bytes()),
            "base model": read_run(new).digests,
        },
    )


def find_descendants(run: Path, new: Path, folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each run and model that descends from a run's adapters.

    Beside the run's own folder, ``folders`` are searched: for copies of the global adapter, for
    cards that name the run, as those of exported and merged models do, and for runs that began
    with such an adapter.
    """
    from server_app.checkpoint import load_run_checkpoint

    run, new, *searched = (each.resolve() for each in (run, new, *folders))
    digest, lineage = _digest(run), load_run_checkpoint(run).progress.lineage
    places = {run.parent, *searched}
    files = sorted({file for place in places for file in place.rglob("config.json")})
    begun = {file.parent: initial for file in files if (initial := _initial_adapter(file))}
    ancestors = [run]
    for ancestor in ancestors:  # which grows
        for folder in [each for each, initial in begun.items() if ancestor in initial.parents]:
            ancestors.append(folder)
            del begun[folder]
            yield f"began with its adapter: {folder}"
    for card in sorted({card for place in places for card in place.rglob("README.md")}):
        folder = card.parent
        if run in folder.parents or new in folder.parents:
            continue
        adapter = folder / _ADAPTER
        is_copy = adapter.exists() and _sha256(adapter) == digest
        if is_copy or lineage in card.read_text(encoding="utf-8", errors="replace"):
            yield f"contains what it learnt: {folder}"


def _initial_adapter(file: Path) -> Path | None:
    try:
        value = json.loads(file.read_bytes()).get("initial-adapter")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(value).expanduser().resolve() if value else None


def _digest(run: Path) -> str:
    return _sha256(run / "adapters" / "global" / _ADAPTER)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
