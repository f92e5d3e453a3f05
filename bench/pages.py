"""Copy the recorded output of measurements to the documentation: ``python -m bench.pages``.

To record a measurement's output, redirect it to a file:

    python -m bench.wires > docs/recorded/wires.md

A page of ``docs/`` shows a record between two comments, the first of which names the file. This
command replaces the text between the comments; a test fails if it differs from the record.
"""

import re
from pathlib import Path

from bench.harness import command

DOCS = Path(__file__).parent.parent / "docs"
_PART = re.compile(r"(<!-- (recorded/[\w/-]+\.md) -->\n).*?(<!-- until here -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return a page's text with the recorded outputs between its comments."""

    def part(found: re.Match[str]) -> str:
        return found[1] + (DOCS / found[2]).read_text(encoding="utf-8") + found[3]

    return _PART.sub(part, page)


def main() -> None:
    """Update the records that the pages of ``docs/`` show."""
    command(__doc__).parse_args()
    for file in DOCS.glob("*.md"):
        page = file.read_text(encoding="utf-8")
        file.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
