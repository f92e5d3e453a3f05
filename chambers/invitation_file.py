"""Files with invitations to a served model."""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from chambers.errors import CommandError, read_bytes
from split.protocol.standing_invitation import StandingInvitation


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
