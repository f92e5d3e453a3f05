"""The models and the server of ``chambers serve``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from chambers.errors import CommandError, describe_error
from finetuning.adapters.adapter import State
from finetuning.errors import BaseModelError
from finetuning.files import write_secret
from finetuning.model.fingerprint import PARTIES_SHARE, fingerprint
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.adapters import body_digest
from split.model.loading import tensors_of
from split.model.partition import Partition
from split.protocol.standing_invitation import StandingInvitation
from split.server.body import load_body
from split.server.model_server import ModelServer
from split.settings import SplitSettings


@dataclass(frozen=True)
class Served:
    """The models to serve."""

    settings: ModelSettings
    split: SplitSettings
    partition: Partition
    directory: Path  # contains the base model, or the server's part
    adapter: AdapterSettings  # kind and scale of all adapters
    # The body's adapters, keyed by client and model name; None for no adapter.
    models: Mapping[str, Mapping[str, State | None]]
    folder: Path  # folder for the invitations
    max_prompt_length: int


@contextmanager
def serve_models(served: Served, lifetime: float) -> Iterator[tuple[str, dict[str, Path]]]:
    """Load the body, listen, and write an invitation for each client.

    Invitations expire after ``lifetime`` seconds. Yield the address, and each client's file. Raise
    ``UserError`` if the body can't be loaded, the server can't listen on the address, or an
    invitation can't be written.
    """
    try:
        body = load_body(served.directory, served.settings, served.split)
    except BaseModelError as error:
        # Name the command's option instead of the setting.
        reason = str(error).replace("split.body-devices", "--body-devices")
        raise CommandError(reason) from error
    except OSError as error:
        raise CommandError(f"{served.directory} can't be read: {error}") from error
    try:
        server = ModelServer(
            body=body,
            adapter=served.adapter,
            split=served.split,
            run="chambers serve",
            max_prompt_length=served.max_prompt_length,
        )
    except OSError as error:
        raise CommandError(
            f"--listen {served.split.listen}: the port is in use, or this machine does not have "
            "that address"
        ) from error
    try:
        yield server.address, _invite(server, served, lifetime)
    finally:
        server.stop()


def _invite(server: ModelServer, served: Served, lifetime: float) -> dict[str, Path]:
    """Write the invitations; return their files, keyed by client."""
    digests = fingerprint(served.directory)
    of_clients = tensors_of(served.directory, served.partition, ("head", "tail"))
    needed = {name: digests[name] for name in {*PARTIES_SHARE, *of_clients} if name in digests}
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
        files[client] = file = served.folder / f"{client}.json"
        try:
            write_secret(file, f"{content.model_dump_json(indent=1)}\n".encode())
        except OSError as error:
            reason = describe_error(error)
            raise CommandError(f"the invitation {file} can't be written: {reason}") from error
    return files
