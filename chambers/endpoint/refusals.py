"""Refusals of requests, in the form and the words of OpenAI's API."""

import re

from pydantic import ValidationError

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An error that the client receives in the form of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        parameter: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, "type": kind, "param": parameter, "code": code}


def refusal_of(error: ValidationError) -> ApiError:
    """Describe the first problem of a request, without its values."""
    problem = error.errors(include_url=False, include_input=False)[0]
    # For a value that can have one of several types, the location contains a type's name.
    parts = [part for part in problem["loc"] if part != "str" and not str(part).endswith("]")]
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts]
    name = str(problem.get("ctx", {}).get("name", "".join(names).removeprefix("."))) or None
    code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}.get(
        problem["type"], "invalid_value"
    )
    reason = re.sub("^[A-Z]\\w+ should", "it should", problem["msg"]).partition(" after valid")[0]
    reason = reason.removeprefix("Value error, ")
    text = {
        "json_invalid": "The body of the request is not valid JSON.",
        "missing": f"Missing required parameter: '{name}'.",
        "extra_forbidden": f"Unknown parameter: '{name}'.",
        "unsupported": f"{problem['msg']}.",
    }.get(problem["type"], f"Invalid '{name}': {reason}.")
    return ApiError(400, text, INVALID, name, code)
