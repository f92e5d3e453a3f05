"""Files with invitations to a served model."""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from chambers.errors import CommandError, described, read_bytes
from finetuning.files import write_secret
from split.protocol.standing_invitation import StandingInvitation


def write_invitation(invitation: StandingInvitation, file: Path) -> None:
    """Write an invitation to a file that only the user can read; replace an existing file.

    Raise ``CommandError`` if the file can't be written.
    """
    try:
        write_secret(file, f"{invitation.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        reason = described(error)
        raise CommandError(f"the invitation {file} can't be written: {reason}") from error


def read_invitation(file: Path) -> StandingInvitation:
    """Read an invitation; raise ``CommandError`` if it is unreadable, invalid or expired."""
    try:
        found = StandingInvitation.model_validate_json(read_bytes(file))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise CommandError(
            f"{file} is not an invitation that `chambers serve` has written "
            f"({f'{where}: ' if where else ''}{problem['msg']}); ask for the file again"
        ) from None
    if found.expires <= datetime.now(UTC):
        raise CommandError(
            f"the invitation {file} expired on {found.expires:%Y-%m-%d at %H:%M} UTC; ask the "
            "coordinator for a new one"
        )
    return found
