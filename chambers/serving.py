"""The models and the server of ``chambers serve``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from chambers.errors import CommandError
from chambers.invitation_file import write_invitation
from chambers.sources import RunFolder, open_adapter, refuse_other_base, split_adapter
from federation.messages import is_name
from finetuning.adapters.adapter import State
from finetuning.adapters.saved import SavedAdapter
from finetuning.model.base_model import BaseModelError
from finetuning.model.fingerprint import PARTIES_SHARE, fingerprint
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.adapters import body_digest
from split.model.devices import body_devices
from split.model.exactness import check_exactness
from split.model.loading import load_parts, locate_parts, tensors_of
from split.model.partition import Partition, partition_of
from split.protocol.standing_invitation import StandingInvitation
from split.server.model_server import ModelServer
from split.settings import SplitSettings

_RUN = "chambers serve"


@dataclass(frozen=True)
class Served:
    """The models to serve.

    Attributes:
        settings: The base model, and how to load it.
        split: Addresses, partition, wire type, and limit of tokens in memory.
        partition: Number of blocks of each party.
        directory: Directory of the base model, or of the server's part of it.
        adapter: Kind and scale of all adapters.
        models: By client and model name, the adapter of the body; None for no adapter.
        folder: Folder for the invitations.
        max_prompt_length: Maximum number of tokens in a prompt.

    """

    settings: ModelSettings
    split: SplitSettings
    partition: Partition
    directory: Path
    adapter: AdapterSettings
    models: Mapping[str, Mapping[str, State | None]]
    folder: Path
    max_prompt_length: int


def find(
    *,
    run: RunFolder | None,
    personalised: bool,
    adapter: SavedAdapter | None,
    settings: ModelSettings,
    split: SplitSettings,
    clients: Sequence[str],
    folder: Path,
    max_prompt_length: int,
) -> Served:
    """Find the parts of the models to serve, and check that they are compatible.

    Args:
        run: The run that trained the adapters, if known.
        personalised: Whether to serve the run's personalised adapters too.
        adapter: The adapter that all clients may use; None for the base model alone.
        settings: The base model.
        split: Addresses, partition and limits.
        clients: Names of the clients to invite.
        folder: Folder for the invitations.
        max_prompt_length: Maximum number of tokens in a prompt.

    Raises:
        UserError: A part is missing, or incompatible with the others.

    """
    for name in clients:
        if not is_name(name):
            raise CommandError(
                f"--clients {name!r} can't be a client's name: letters, digits, ' ', '.', '-'"
            )
    directory = locate_parts(settings.name, split, ("body",))
    if run is not None:
        own = fingerprint(directory)
        refuse_other_base(own, run.digests, f"that of {run.directory}")
    partition = partition_of(directory, split)
    common = {} if adapter is None else {"global": split_adapter(adapter, partition)["body"]}
    check_exactness(
        directory=directory,
        settings=settings,
        partition=partition,
        prefixes=adapter is not None and adapter.settings.kind == "prefix",
        generation=True,
    )
    models: dict[str, dict[str, State | None]] = {c: {"base": None, **common} for c in clients}
    if personalised and run is not None:
        for client in {*clients} & {*run.clients}:
            own_adapter = open_adapter(run.directory / "adapters" / "clients" / client)
            models[client]["personalised"] = split_adapter(own_adapter, partition)["body"]
    return Served(
        settings=settings,
        split=split,
        partition=partition,
        directory=directory,
        adapter=adapter.settings if adapter else AdapterSettings(),
        models=models,
        folder=folder,
        max_prompt_length=max_prompt_length,
    )


@contextmanager
def serving(served: Served, lifetime: float) -> Iterator[tuple[str, dict[str, Path]]]:
    """Load the body, listen, and write an invitation for each client.

    Args:
        served: The models.
        lifetime: Seconds until the invitations expire.

    Yields:
        The address, and the invitation files by client.

    Raises:
        UserError: The body can't be loaded, the server can't listen on the address, or an
            invitation can't be written.

    """
    try:
        devices = body_devices(served.split)
        parts = load_parts(
            settings=served.settings,
            directory=served.directory,
            partition=served.partition,
            parties=("body",),
            devices=devices,
        )
    except BaseModelError as error:
        # Here the devices are set by an option, since they may differ from those used in training.
        reason = str(error).replace("split.body-devices", "--body-devices")
        raise CommandError(reason) from error
    except OSError as error:
        raise CommandError(f"{served.directory} can't be read: {error}") from error
    try:
        server = ModelServer(
            body=parts["body"],
            adapter=served.adapter,
            split=served.split,
            run=_RUN,
            max_prompt_length=served.max_prompt_length,
        )
    except OSError as error:
        raise CommandError(
            f"--listen {served.split.listen}: the port is in use, or the address is not one of "
            "this machine"
        ) from error
    try:
        yield server.address, _invite(server, served, lifetime)
    finally:
        server.stop()


def _invite(server: ModelServer, served: Served, lifetime: float) -> dict[str, Path]:
    """Write the invitations; return the files by client."""
    digests = fingerprint(served.directory)
    theirs = tensors_of(served.directory, served.partition, ("head", "tail"))
    needed = {name: digests[name] for name in {*PARTIES_SHARE, *theirs} if name in digests}
    files = {}
    for client, models in served.models.items():
        invitation = server.invite(client, models, lifetime)
        content = StandingInvitation(
            address=invitation.address,
            suite=served.split.key_exchange,
            server_key=invitation.server_key,
            run=invitation.identity.run,
            client=client,
            ticket=invitation.ticket.identifier,
            secret=invitation.ticket.secret,
            expires=datetime.now(UTC) + timedelta(seconds=lifetime),
            model=served.settings.name,
            digests=dict(sorted(needed.items())),
            blocks=served.partition.blocks,
            head_blocks=served.partition.head,
            tail_blocks=served.partition.tail,
            wire_dtype=served.split.wire_dtype,
            max_tokens=served.split.activation_budget,
            max_prompt_length=served.max_prompt_length,
            models={name: body_digest(served.adapter, state) for name, state in models.items()},
        )
        files[client] = served.folder / f"{client}.json"
        write_invitation(content, files[client])
    return files
