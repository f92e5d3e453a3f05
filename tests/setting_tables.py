"""The tables of all settings in ``docs/``: ``python -m tests.setting_tables`` writes them."""

import re
from pathlib import Path

from federation.run_config import RunConfig, allowed, leaves
from federation.site_file import SiteFile
from federation.site_policy import SitePolicy

DOCS = Path(__file__).parent.parent / "docs"


def run_config_table() -> str:
    """Return the table of ``docs/configuration.md``."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field, value in leaves(RunConfig()):
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        meaning = str(field.description).replace("|", "\\|")
        lines.append(f"| `{key}` | `{shown}` | {allowed(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def policy_table() -> str:
    """Return the table of ``docs/policy.md``."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, field, value in leaves(SitePolicy()):
        shown = "–" if value is None or value == "" else f"`{str(value).lower()}`"
        lines.append(f"| `{key}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"


def site_table() -> str:
    """Return the table of the site file's keys in ``docs/policy.md``."""
    lines = ["| key of the site file | meaning |", "|---|---|"]
    for field in SiteFile.model_fields.values():
        lines.append(f"| `{field.alias}` | {field.description} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the tables of settings in both pages."""
    for name, table in (("configuration.md", run_config_table()), ("policy.md", policy_table())):
        page = (DOCS / name).read_text(encoding="utf-8")
        (before, old, after) = re.split(r"(^\| key \| default \|.*\n(?:\|.*\n)*)", page, flags=re.M)
        assert old, name
        (DOCS / name).write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
