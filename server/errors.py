"""Errors as OpenAI's clients know them. Knows no HTTP library."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from jaxserve.server.protocol import ErrorBody, ErrorDetail
from jaxserve.validation import nearest_name

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_LONGEST = 1000  # characters of a message: it may quote what the client has sent
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*)(?:[:=]| must )")
_CLIENTS_NAMES = {"prompt_token_ids": "prompt", "runner": "model"}


class ApiError(Exception):
    """What a client is told instead of an answer. `param` is the field that is wrong, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> str:
        """The JSON of the answer, also of an event in a stream that has begun."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump_json()


@contextmanager
def refusals(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Makes a client's error of a ValueError: what the engine refuses begins with the field's name. `names` are what
    the client calls fields of the engine, where it has other names for them."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for own, clients in (names or {}).items():
            message = re.sub(rf"\b{own}\b", clients, message, count=1)
        found = _FIELD.match(message)
        param = found[1] if found else None
        raise ApiError(400, message, param=_CLIENTS_NAMES.get(param, param), code="invalid_value") from None


def wrong_body(error: ValidationError, names: list[str]) -> ApiError:
    """What is wrong with a body: the first field and everything that is said of it. `names` are the known fields."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    field = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        near = nearest_name(field, names) if "." not in field else None
        hint = f" (did you mean {near!r}?)" if near else ""
        return ApiError(400, f"{field}: unknown field{hint}", param=field, code="unknown_field")
    if not first["loc"]:
        return ApiError(400, f"the body: {first['msg']}", code="invalid_json")
    same = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    if len(same) > 1:  # the branches of a union, or many wrong items
        field = str(first["loc"][0])
    said = list(dict.fromkeys(problem["msg"] for problem in same))
    return ApiError(400, f"{field}: {'; or '.join(said[:4])}", param=field, code="invalid_type")


def _path(location: tuple[Any, ...]) -> str:
    """`messages[0].role` of ("messages", 0, "role")."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
