"""The page at `/`: files of the folder `page`, sent as they are."""

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing but this server's own files and paths; no inline code; in nobody's frame.
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked for: files of two versions do not fit together
}


def routes() -> list[Route]:
    """`/` and `/page/NAME`. The page shows nothing that needs a key: what it asks of the API carries the user's."""
    found = []
    for file in files("jaxserve.server").joinpath("page").iterdir():
        name = file.name
        suffix = name[name.rfind(".") :]
        path = "/" if name == "index.html" else f"/page/{name}"
        found.append(Route(path, _File(file.read_bytes(), _TYPES[suffix]), methods=["GET"]))
    return found


class _File:
    """Answers with the file, or with 304 to whoever has it already."""

    def __init__(self, content: bytes, media_type: str):
        self._content, self._type = content, media_type
        self._headers = _HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = Request(scope).headers.get("if-none-match", "")
        if self._headers["ETag"] in known:
            response = Response(status_code=304, headers=self._headers)
        else:
            response = Response(self._content, headers=self._headers, media_type=self._type)
        await response(scope, receive, send)
