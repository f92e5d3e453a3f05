"""Names of clients."""

import re
import unicodedata

# Pattern of a client's name, which is also used as a folder name.
NAME = re.compile(r"\w[\w .-]{0,62}\w|\w")
# File systems limit a folder name to 255 bytes; temporary names are a few bytes longer.
_MAX_NAME_BYTES = 200


# What `is_name` demands, as the end of a sentence about a name.
RULE = (
    "must be at most 64 letters, digits, ' ', '.', '_' or '-' (at most 200 bytes), with a letter, "
    "digit or '_' at both ends"
)


def is_name(text: str) -> bool:
    """Return whether a text is a valid client name; accents may be characters of their own."""
    whole = unicodedata.normalize("NFC", text)
    return NAME.fullmatch(whole) is not None and len(text.encode()) <= _MAX_NAME_BYTES


def folded(name: str) -> str:
    """Return a form of a name that is the same for all names that a file system may confuse."""
    return unicodedata.normalize("NFC", name).casefold()
