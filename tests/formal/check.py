"""Check the models' properties for each pair of compromised secrets, with the prover E.

`python -m tests.formal.check` prints the tables of README.md. E saturates a query's clauses: if it
ends without a contradiction, the query can't be reached, and the property is proven.
"""

import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

SECRETS = ("ticket", "server-key", "client-share", "server-share", "wrapped", "resumption")
# By column of the table: for each property, when the secrets are compromised, and the query.
QUERIES = {
    "stream 1": {
        "secret": ("before", "secret"),
        "server": ("before", "no-answer"),
        "client": ("before", "no-finish"),
    },
    "stream 1, later": {"secret": ("after", "past")},
    "stream 2": {
        "secret": ("before", "secret2"),
        "server": ("before", "no-answer2"),
        "client": ("before", "no-finish2"),
    },
    "stream 2, later": {
        "secret": ("after", "secret2"),
        "server": ("after", "no-answer2"),
        "client": ("after", "no-finish2"),
    },
}
SUM_SECRETS = ("peer-key", "run-key", "reviewer-key")
SUM_QUERIES = {
    "before": {
        "alone": ("before", "alone"),
        "mixed": ("before", "mixed"),
        "lineages": ("before", "lineages"),
    },
    "later": {"alone": ("after", "past")},
}
LANE, SUMS = (Path(__file__).with_name(f"{name}.horn") for name in ("lane", "sums"))
_SECONDS = 60
_CALL = re.compile(r"\b(\w+)\(")


def holds(secrets: tuple[str, ...], when: str, query: str, model: Path = LANE) -> bool:
    """Return whether a query can't be reached with these secrets compromised.

    Raises:
        RuntimeError: E finds neither a proof nor a saturated set of clauses.

    """
    limits = {"answer", "finish", "answer2", "finish2"} - {query.removeprefix("no-")}
    labels = {when, query, *secrets, *(f"any-{limit}" for limit in limits)}
    command = ["eprover", "--auto", "--silent", f"--cpu-limit={_SECONDS}"]
    problem = "\n".join(clauses(model.read_text(), labels))
    output = subprocess.run(command, input=problem, capture_output=True, text=True, check=False)
    found = re.search(r"SZS status (Satisfiable|Unsatisfiable)", output.stdout)
    if found is None:
        raise RuntimeError(f"{query} with {secrets}: {output.stdout}{output.stderr}")
    return found[1] == "Satisfiable"


def clauses(text: str, labels: set[str]) -> Iterator[str]:
    """Yield the model's clauses with these labels or no label, in E's language (TPTP)."""
    yield "cnf(agreement, axiom, dh(X, pub(Y)) = dh(Y, pub(X)))."
    short: dict[str, tuple[list[str], str]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if ":=" in line:
            left, term = line.split(" := ")
            name, parameters = left.rstrip(")").split("(")
            short[name] = (parameters.split(", "), term)
            continue
        label, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        if label and label[1:] not in labels:
            continue
        before, _, head = expanded(rest, short).partition("->")
        literals = [f"~{literal}" for literal in arguments(before)] + arguments(head)
        yield f"cnf(clause, axiom, {' | '.join(literals)})."


def expanded(text: str, short: dict[str, tuple[list[str], str]]) -> str:
    """Return a text with its abbreviations written out."""
    for call in _CALL.finditer(text):
        if call[1] in short:
            inner, rest = closed(text[call.end() :])
            parameters, term = short[call[1]]
            values = dict(zip(parameters, arguments(inner), strict=True))
            words = re.split(r"(\W+)", term)
            term = "".join(values.get(word, word) for word in words)
            return expanded(text[: call.start()] + term + rest, short)
    return text


def closed(text: str) -> tuple[str, str]:
    """Divide a text at its unmatched closing bracket."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:place], text[place + 1 :]
    raise ValueError(f"a bracket is not closed: {text}")


def arguments(text: str) -> list[str]:
    """Divide a text at its commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def table(
    secrets: tuple[str, ...] = SECRETS,
    queries: dict[str, dict[str, tuple[str, str]]] = QUERIES,
    model: Path = LANE,
) -> str:
    """Return a table of all sets of at most two secrets whose compromise breaks a property."""
    lines = [f"| compromised | {' | '.join(queries)} |", "|---" * (1 + len(queries)) + "|"]
    for some in (s for count in range(3) for s in combinations(secrets, count)):
        cells = [
            ", ".join(name for name, query in own.items() if not holds(some, *query, model))
            for own in queries.values()
        ]
        if any(cells):
            lines.append(f"| {' + '.join(some) or 'nothing'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if holds((), "before", "opens") or holds((), "before", "resumes"):
        raise SystemExit("lanes can't be opened or can't be resumed: the model proves nothing")
    print(table())
    print(table(SUM_SECRETS, SUM_QUERIES, SUMS), end="")
