"""What every HTTP request passes: a name for it, and the key where keys are asked for."""

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.endpoint import error_response
from jaxserve.server.errors import ApiError

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
GUARDED = ("/v1/", "/tokenize", "/detokenize")


class RequestIds:
    """`X-Request-Id` of the client, or a new one: in the scope's state and in the response's head."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, named)


class ApiKeys:
    """401 for whoever comes to the API without one of the keys. The key's number names the tenant."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"].startswith(GUARDED):
            kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            number = self._number(key.strip()) if kind.lower() == b"bearer" else None
            if number is None:
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, "a valid API key is needed", code="invalid_api_key", headers=headers)
                await error_response(error)(scope, receive, send)
                return
            scope["state"]["tenant"] = f"key {number}"
        await self._app(scope, receive, send)

    def _number(self, key: bytes) -> int | None:
        """Which key it is. Takes the same time whatever is wrong with it."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
