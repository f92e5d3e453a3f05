"""``chambers serve`` and ``chambers stage``: compute middle blocks for other machines."""

import logging
import signal
import ssl
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError

from chambers.errors import CommandError
from chambers.sources import (
    AdapterOptions,
    RunFolder,
    argument,
    count,
    find_run,
    global_adapter,
    option,
    read_run,
    refuse_other_base,
    split_adapter,
)
from federation.names import is_name
from finetuning.adapters.saved import read_adapter
from finetuning.settings import AdapterSettings
from split.address import is_unspecified
from split.settings import SplitSettings

if TYPE_CHECKING:
    from chambers.serving import Served
    from finetuning.adapters.adapter import State

_MAX_DAYS = 3650


@dataclass(frozen=True, kw_only=True)
class Serve(AdapterOptions):
    """Serve the middle blocks of a trained model.

    Institutions have the first and last blocks; together with this server, they can generate text:

    \b
      chambers serve runs/2026-01-31_12-00-00_fl-glm --listen 10.0.0.5:8900 --clients court,hospital

    RUN_FOLDER contains a run's results: its global adapter and the clients' personalised ones.
    Without RUN_FOLDER, name the global adapter with --adapter, or a base model alone with --model.

    For each client, an invitation file is written, to be used with chambers generate --invitation.
    Whoever has the file can use the server in the client's name until the invitation expires or the
    server stops, so send the file confidentially. Restarting the server revokes all invitations.
    Connections are always encrypted. The server runs until it is interrupted.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    run: Annotated[Path | None, argument("RUN_FOLDER")] = None
    head_blocks: Annotated[
        int | None, option("Number of first blocks at clients; default: the run's, else 1.", "N")
    ] = None
    tail_blocks: Annotated[
        int | None, option("Number of last blocks at clients; default: the run's, else 1.", "N")
    ] = None
    listen: Annotated[
        str,
        option(
            "Address and port to listen on; port 0 chooses a free one. Default: 127.0.0.1:0, which "
            "only this machine can reach.",
            "HOST:PORT",
        ),
    ] = "127.0.0.1:0"
    advertise: Annotated[
        str, option("Address and port that clients use, if not those of --listen.", "HOST:PORT")
    ] = ""
    clients: Annotated[
        str,
        option("Invited clients; default: the run's clients with personalised adapters.", "NAME,…"),
    ] = ""
    invitations: Annotated[
        Path, option("Folder for the invitations; default: invitations.", "FOLDER")
    ] = Path("invitations")
    valid_for: Annotated[float, option("Days until invitations expire; default 7.", "DAYS")] = 7.0
    body_devices: Annotated[
        str | None,
        option("GPUs for the blocks, or cpu; default: as in the run, else all GPUs.", "cuda:0,…"),
    ] = None
    wire_dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        option("Data type of hidden states on the network; default: as in the run, else bfloat16."),
    ] = None
    max_tokens: Annotated[
        int,
        option(
            "Maximum number of padded tokens of prompts and answers in memory at once; default "
            "16384. Lower this number if the server runs out of memory.",
            "N",
        ),
    ] = 16384
    max_prompt_length: Annotated[
        int,
        count(
            "Maximum length of a prompt in tokens; default 4096. The time and memory that a prompt "
            "needs grow with the square of its length."
        ),
    ] = 4096

    def __call__(self) -> int:
        """Serve until SIGINT or SIGTERM; raise ``CommandError`` if a GPU kernel fails."""
        if not 0 < self.valid_for <= _MAX_DAYS:
            raise CommandError(
                f"--valid-for {self.valid_for:g}: must be more than 0 and at most {_MAX_DAYS} days"
            )
        self.check_folders()
        from chambers.serving import serve_models
        from finetuning.devices import is_broken

        logging.basicConfig(
            level=logging.INFO,
            stream=sys.stderr,
            format="%(asctime)s %(message)s",
            datefmt="%H:%M:%S",
        )
        over = threading.Event()
        served = self.find_models()
        with serve_models(served, self.valid_for * 24 * 60 * 60) as (address, files):
            for name in (signal.SIGINT, signal.SIGTERM):
                signal.signal(name, lambda *_: over.set())
            for client, file in files.items():
                print(f"invitation of {client} to use {', '.join(served.models[client])}: {file}")
            blocks = served.partition.range_of("body")
            print(f"serving blocks {blocks.start} to {blocks.stop - 1} at {address}", flush=True)
            while not over.wait(5.0):
                if is_broken():
                    raise CommandError(
                        "a GPU kernel has failed, so this process can no longer use the GPU; "
                        "start it again, and distribute the new invitations"
                    )
            print("stopping", flush=True)
        return 0

    def check_folders(self) -> None:
        """See ``AdapterOptions.check_folders``."""
        if self.run and self.adapter:
            raise CommandError("a run's folder and --adapter can't be combined")
        if not (self.run or self.adapter or self.model):
            raise CommandError("nothing to serve: name a run's folder, --adapter or --model")
        if self.run and not self.run.is_dir():
            raise CommandError(f"{self.run} is not a run's folder: there is no such folder")
        super().check_folders()

    def find_models(self) -> "Served":
        """Find the models to serve; raise ``UserError`` if their parts don't match."""
        from chambers.serving import Served
        from finetuning.model.fingerprint import fingerprint
        from split.model.exactness import check_exactness
        from split.model.loading import locate_parts
        from split.model.partition import partition_of

        served_run = read_run(self.run) if self.run else None
        shared = global_adapter(self.run) if self.run else self.adapter
        adapter = read_adapter(shared) if shared else None
        run = served_run or find_run(adapter)
        split = self._split_settings(run.config if run else {})
        clients = self._invited_clients(run)
        settings = self.settings(adapter, run)
        directory = locate_parts(settings.name, split, ("body",))
        if run is not None:
            refuse_other_base(fingerprint(directory), run.digests, f"that of {run.directory}")
        partition = partition_of(directory, split)
        common = {} if adapter is None else {"global": split_adapter(adapter, partition)["body"]}
        prefixes = adapter is not None and adapter.settings.kind == "prefix"
        check_exactness(directory, settings, partition, prefixes, generation=True)
        models: dict[str, dict[str, State | None]] = {c: {"base": None, **common} for c in clients}
        if served_run is not None:
            for client in {*clients} & {*served_run.clients}:
                own_adapter = read_adapter(served_run.directory / "adapters" / "clients" / client)
                models[client]["personalised"] = split_adapter(own_adapter, partition)["body"]
        return Served(
            settings=settings,
            split=split,
            partition=partition,
            directory=directory,
            adapter=adapter.settings if adapter else AdapterSettings(),
            models=models,
            folder=self.invitations,
            max_prompt_length=self.max_prompt_length,
        )

    def _invited_clients(self, run: RunFolder | None) -> list[str]:
        """Return the names of the clients to invite.

        Raise ``CommandError`` if there are none, or one can't be a client's name.
        """
        named = [name.strip() for name in self.clients.split(",") if name.strip()]
        clients = named or (run.clients if run else [])
        if not clients:
            raise CommandError("no clients to invite: add --clients NAME,NAME,…")
        for name in clients:
            if not is_name(name):
                raise CommandError(
                    f"--clients {name!r} can't be a client's name: use letters, digits and ' ._-'"
                )
        return list(dict.fromkeys(clients))

    def _split_settings(self, config: Mapping[str, Any]) -> SplitSettings:
        """Return the settings of the server; options that aren't given default to the run config.

        Raise ``CommandError`` if an option has an invalid value.
        """
        if is_unspecified(self.listen) and not self.advertise:
            raise CommandError(
                f"--advertise HOST:PORT is needed with --listen {self.listen}: clients can't "
                "connect to that address"
            )

        chosen: dict[str, Any] = {
            "key_exchange": config.get("split.key-exchange"),
            "activation_budget": self.max_tokens,
            "listen": self.listen,
            "advertise": self.advertise,
        }
        for name in ("head_blocks", "tail_blocks", "wire_dtype", "body_devices"):
            value = getattr(self, name)
            key = f"split.{name.replace('_', '-')}"
            chosen[name] = config.get(key) if value is None else value
        try:
            return SplitSettings(**{name: v for name, v in chosen.items() if v is not None})
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = str(problem["loc"][0]).replace("_", "-")
            name = name.replace("activation-budget", "max-tokens")
            reason = problem["msg"].removeprefix("Value error, ")
            raise CommandError(f"--{name} {problem['input']}: {reason}") from error


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Compute middle blocks for a coordinator on another host.

    Anyone who has the key can use it, one run after another. docs/operations.md describes the key.
    """

    listen: Annotated[str, option("Address and port to listen on.", "HOST:PORT")]
    key: Annotated[Path, option("File with a private key and its certificate.", "FILE")]

    def __call__(self) -> int:
        """Serve until the process is interrupted."""
        from split.server.stage import serve_stage

        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
        try:
            serve_stage(self.listen, self.key)
        except ssl.SSLError as error:
            raise CommandError(
                f"--key {self.key}: no private key with its certificate in PEM format: {error}"
            ) from error
        except ValueError as error:
            raise CommandError(f"--listen {self.listen}: {error}") from error
