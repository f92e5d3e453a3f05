"""Everything that the documentation names exists: tests, commands, pages and sections."""

import importlib.util
import re
from pathlib import Path

import pytest

from chambers.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "tests" / "formal" / "README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_modules_that_are_named_exist(page):
    text = page.read_text()
    for path in re.findall(r"(?<![\w/])tests/[\w/]*(?:\.(?:py|cpp|md))?", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    for link, section in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if section:
            assert section in anchors(target.read_text()), section


def anchors(text: str) -> set[str]:
    """Return the names of a page's sections, as used in links."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short_and_names_every_page_and_command(capsys):
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", text))
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    for command in re.findall(r"^  (\w+)  ", commands, flags=re.MULTILINE):
        assert re.search(rf"^chambers {command}  ", text, flags=re.MULTILINE), command


def test_commands_that_are_named_exist(capsys):
    # In wire.md, the labels of keys also begin with ``chambers``.
    text = "\n".join(page.read_text() for page in PAGES if page.name != "wire.md")
    command = re.compile(r"(?:`|^)chambers ((?:site|sheet) [a-z-]+|[a-z]+)", re.MULTILINE)
    words = set(command.findall(text))
    assert "site check" in words
    for each in words:
        assert main([*each.split(), "--help"]) == 0, each
    shown = capsys.readouterr().out
    assert "[required]" in shown and "\\[" not in shown
    assert main(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2], "a summary is too long"


def test_each_threat_has_a_command_that_shows_what_protects():
    text = (ROOT / "docs" / "security.md").read_text()
    (table,) = re.findall(r"## Threat model\n\n(.*?)\n\n", text, flags=re.DOTALL)
    marks = [row.split("|")[-2].strip() for row in table.splitlines()[2:]]
    (block,) = re.findall(r"```sh\n(# \(1\).*?)```", text, flags=re.DOTALL)
    parts = re.split(r"^# (?=\()", block, flags=re.MULTILINE)[1:]
    assert [part[:3] for part in parts] == marks == ["(1)", "(2)", "(3)", "(4)", "(5)"]
    for part in parts:
        assert re.search(r"^python -m pytest tests/", part, flags=re.MULTILINE), part
