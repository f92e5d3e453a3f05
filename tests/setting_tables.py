"""The generated tables of ``docs/``: ``python -m tests.setting_tables`` writes them."""

import re
from pathlib import Path

from federation.run_config import RunConfig, leaves
from federation.setting_errors import describe_allowed
from federation.site_file import SiteFile
from federation.site_policy import SitePolicy
from tests.finetuning.conftest import HYBRIDS
from tests.split.conftest import ARCHITECTURES
from tests.wrappers import RECURRENT, SHARING, WRAPPERS

DOCS = Path(__file__).parent.parent / "docs"


def run_config_table() -> str:
    """Return the table of ``docs/configuration.md``."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field, value in leaves(RunConfig()):
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        meaning = str(field.description).replace("|", "\\|")
        lines.append(f"| `{key}` | `{shown}` | {describe_allowed(field)} | {meaning} |")
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


def families_table() -> str:
    """Return the table of ``docs/models.md``, from the models that the tests try."""
    texts = {name: text.items() for name, (_, _, text, *_) in WRAPPERS.items()}
    whole_only = {name for name, text in texts.items() if SHARING.items() <= text}
    recurrent = {name for name, text in texts.items() if RECURRENT.items() <= text}
    recurrent |= HYBRIDS.keys() - {"Lfm2"}  # its convolutions can go back
    names = {*ARCHITECTURES, *WRAPPERS} - {"Gemma3Text", "Qwen3_5Text"}
    rows = (
        (names - recurrent - whole_only, "yes | yes | yes"),
        (names & recurrent, "yes | yes, without drafts | yes"),
        (names & whole_only, "no | yes | yes"),
    )
    lines = ["| family | whole | split | generation | privacy |", "|---|---|---|---|---|"]
    for some, what in rows:
        lines.append(f"| {', '.join(sorted(some))} | yes | {what} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the tables in the pages."""
    tables = {
        "configuration.md": run_config_table(),
        "policy.md": policy_table(),
        "models.md": families_table(),
    }
    for name, table in tables.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        head = re.escape(table.partition("\n")[0])
        (before, old, after) = re.split(rf"(^{head}\n(?:\|.*\n)*)", page, flags=re.M)
        assert old, name
        (DOCS / name).write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
