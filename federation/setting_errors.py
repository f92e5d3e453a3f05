"""What is wrong with a setting: unknown keys, and values that aren't allowed."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo


def explain_problem(
    problem: dict[str, Any], values: Mapping[str, Any], fields: Mapping[str, FieldInfo]
) -> str:
    """Describe one pydantic error in a line, with the key, its value and the allowed values."""
    key = ".".join(str(part) for part in problem["loc"])
    reason = problem["msg"].removeprefix("Value error, ")
    if key not in fields:
        return f"  {reason}"
    if problem["type"] == "string_type":
        reason = "must be text, in quotation marks"
    if key == "strategy" and str(values.get(key)).lower() == "fedavg":
        reason = 'FedAvg is the strategy "fedjudge-base"'
    return f"  {key} = {values.get(key)!r}: {reason} (allowed: {describe_allowed(fields[key])})"


# Settings by their names in other tools.
_OTHER_NAMES = {
    "lr": "train.learning-rate",
    "lora-r": "adapter.rank",
    "lora-alpha": "adapter.alpha",
    "target-modules": "adapter.targets",
    "max-seq-length": "data.max-length",
    "num-rounds": "rounds",
}


def explain_unknown(key: str, value: Any, fields: Mapping[str, FieldInfo]) -> str:
    """Describe an unknown key in a line, with the key that may have been meant."""
    usual = _OTHER_NAMES.get(key.rpartition(".")[2].replace("_", "-").lower())
    close = [usual] if usual else difflib.get_close_matches(key, list(fields), n=1)
    hint = f"did you mean {close[0]}?" if close else "docs/configuration.md lists all keys"
    return f"  {key} = {value!r}: unknown key; {hint}"


def require_absolute(path: str) -> str:
    """Return an empty or absolute path, or one that begins with ~; else raise ``ValueError``.

    A Flower app runs in Flower's own folder, to which a relative path would refer.
    """
    try:
        is_absolute = Path(path).expanduser().is_absolute()
    except RuntimeError as error:
        raise ValueError("names the home folder of an unknown user") from error
    if path and not is_absolute:
        raise ValueError("must be an absolute path (or start with ~)")
    return path


def describe_allowed(field: FieldInfo) -> str:
    """Describe a field's type and bounds."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" if value else '`""`' for value in get_args(annotation))
    kind = {bool: "true or false", int: "whole number", float: "number", str: "text"}[annotation]  # type: ignore[index]
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(item, name, None) is not None
    ]
    return ", ".join([kind, *bounds])
