"""Names of clients."""

import re

# Pattern of a client's name, which is also used as a folder name.
NAME = re.compile(r"\w[\w .-]{0,62}\w|\w")
# File systems limit a folder name to 255 bytes; temporary names are a few bytes longer.
_MAX_NAME_BYTES = 200


def is_name(text: str) -> bool:
    """Return whether a text is a valid client name."""
    return NAME.fullmatch(text) is not None and len(text.encode()) <= _MAX_NAME_BYTES
