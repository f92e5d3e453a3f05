"""Refusals of requests, in the form and the words of OpenAI's API."""

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
    kind, given = problem["type"], problem.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"The body of the request is not valid JSON: {given['error']}.")
    # For a value that can have one of several types, the location contains a type's name.
    parts = [part for part in problem["loc"] if part != "str" and not str(part).endswith("]")]
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts]
    name = str(given.get("name", "".join(names).removeprefix("."))) or None
    reason = problem["msg"].removeprefix("Input should be ")
    if kind == "unsupported":
        text, code = f"Unsupported parameter: '{name}': {reason}.", "unsupported_parameter"
    elif kind == "missing":
        text, code = f"Missing required parameter: '{name}'.", "missing_required_parameter"
    elif kind == "extra_forbidden":
        text, code = f"Unknown parameter: '{name}'.", "unknown_parameter"
    elif kind.endswith("_type"):
        text, code = f"Invalid type for '{name}': expected {reason}.", "invalid_type"
    else:
        text, code = f"Invalid value for '{name}': expected {reason}.", "invalid_value"
    return ApiError(400, text, INVALID, name, code)
