"""The life of one POST: a body under limits, an answer or a stream, and an end when the client goes away.

These are ASGI applications: Starlette routes to them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.messages import EngineDeadError
from jaxserve.request import GRAMMAR_GAVE_UP, NO_TOKEN_LEFT
from jaxserve.server.answers import GenerationFailed
from jaxserve.server.errors import ApiError, wrong_body
from jaxserve.server.service import Service
from jaxserve.server.tracing import CONTEXT_HEADERS

_log = logging.getLogger("jaxserve.server")

LAST_WORDS_SECONDS = 1.0  # what a client gets to take the news that its request is ended
BUG = "the server has failed; its log says why"
CLIENT_GONE = 499  # what nginx logs for it; nobody gets it


@dataclass
class Call:
    """One request as the log tells of it. `details` are added to its line."""

    request_id: str
    path: str
    tenant: str = ""
    started: float = field(default_factory=time.monotonic)
    first_output: float | None = None
    status: int = 200
    answering: bool = False  # the response has begun
    streaming: bool = False
    error: str | None = None
    trace_headers: dict[str, str] = field(default_factory=dict)  # the caller's span
    details: dict[str, Any] = field(default_factory=dict)

    def log(self) -> None:
        line = {"request_id": self.request_id, "path": self.path, "status": self.status, **self.details}
        if self.first_output is not None:
            line["ttft_ms"] = round(1000 * (self.first_output - self.started), 1)
        line["total_ms"] = round(1000 * (time.monotonic() - self.started), 1)
        if self.error is not None:
            line["error"] = self.error
        _log.info("request", extra={"line": line})


# What an endpoint makes of a validated body: the JSON of an answer, or the events of a stream (JSON, too).
Handler = Callable[[Service, Call, Any], Awaitable[str | AsyncIterator[list[str]]]]


class Post:
    """An endpoint that takes a JSON body of `request_type`."""

    def __init__(self, service: Service, request_type: type[BaseModel], handler: Handler):
        self._service, self._type, self._handler = service, request_type, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        call = Call(state["request_id"], scope["path"], state.get("tenant", ""))
        if self._service.tracing is not None:
            given = {name: value for name, value in scope["headers"] if name in CONTEXT_HEADERS}
            call.trace_headers = {name.decode(): value.decode("latin-1") for name, value in given.items()}
        try:
            body = await _read_body(
                scope, receive, self._service.config.max_request_bytes, self._service.config.body_timeout
            )
            if body is None:
                call.status, call.error = CLIENT_GONE, "disconnected"
            else:
                await self._watch(call, body, scope, receive, send)
        except ApiError as error:
            await _answer_error(call, error, scope, receive, send)
        except BaseException as error:
            call.status, call.error = 500, type(error).__name__
            raise
        finally:
            call.log()

    async def _watch(self, call: Call, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until that is done, the client is gone, time is up, or the server has to end."""
        service = self._service
        work = asyncio.create_task(self._work(call, body, scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        service.tasks.add(work)
        try:
            await asyncio.wait(
                {work, gone}, timeout=service.config.request_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            service.tasks.discard(work)
            timed_out, left = not (work.done() or gone.done()), gone.done() and not work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()
        elif left:
            call.status, call.error = CLIENT_GONE, "disconnected"
        else:
            error = _timed_out(service.config.request_timeout) if timed_out else ApiError(503, "the server is stopping")
            await self._last_words(call, error, scope, receive, send)

    async def _last_words(self, call: Call, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell a client that its request has been ended, unless it does not read."""
        if call.answering and not call.streaming:  # in the middle of a body
            call.status, call.error, told = error.status, error.message, False
        else:
            telling = asyncio.create_task(_answer_error(call, error, scope, receive, send))
            told = bool((await asyncio.wait({telling}, timeout=LAST_WORDS_SECONDS))[0])
            telling.cancel()
        if not told and (transport := scope["state"].get("transport")) is not None:
            transport.abort()

    async def _work(self, call: Call, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                request = self._type.model_validate_json(body)
            except ValidationError as error:
                raise wrong_body(error, list(self._type.model_fields)) from None
            answer = await self._handler(self._service, call, request)
            if isinstance(answer, str):
                call.answering = True
                await Response(answer, media_type="application/json")(scope, receive, send)
            else:
                await _stream(call, answer, send)
        except ApiError as error:
            await _answer_error(call, error, scope, receive, send)
        except GenerationFailed as error:
            status = 400 if str(error).startswith((NO_TOKEN_LEFT, GRAMMAR_GAVE_UP)) else 500
            await _answer_error(call, ApiError(status, str(error), code="generation_failed"), scope, receive, send)
        except EngineDeadError as error:
            await _answer_error(call, ApiError(500, f"the engine has ended: {error}"), scope, receive, send)
        except Exception:
            _log.exception("request %s has met a bug", call.request_id)
            await _answer_error(call, ApiError(500, BUG), scope, receive, send)


def _timed_out(seconds: float) -> ApiError:
    # The official clients would try again, and time out again.
    return ApiError(504, f"the request took longer than {seconds:g} s", headers={"x-should-retry": "false"})


async def _read_body(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes | None:
    """The body, or None if the client left before its end."""
    headers = dict(scope["headers"])
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise ApiError(415, "Content-Type must be application/json")
    too_large = ApiError(
        413, f"the body is larger than {most} bytes", code="body_too_large", headers={"Connection": "close"}
    )
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s", headers={"Connection": "close"}) from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(call: Call, events: AsyncIterator[list[str]], send: Send) -> None:
    """Server-sent events; the head goes out with the first of them, so that what is wrong has its status."""
    async with aclosing(events):  # at once, also when the client leaves between two of them
        async for batch in events:
            if not call.answering:
                await _begin_stream(call, send)
            await _send_events(send, batch)
    if not call.answering:
        await _begin_stream(call, send)
    await _send_events(send, ["[DONE]"], last=True)


async def _begin_stream(call: Call, send: Send) -> None:
    call.answering = call.streaming = True
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    headers.append((b"x-accel-buffering", b"no"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_events(send: Send, events: list[str], last: bool = False) -> None:
    body = "".join([f"data: {event}\n\n" for event in events]).encode()
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _answer_error(call: Call, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """An answer with its status or, in a stream that has begun, a last event."""
    call.status, call.error = error.status, error.message
    if call.streaming:
        await _send_events(send, [error.body()], last=True)
    elif not call.answering:
        call.answering = True
        await error_response(error)(scope, receive, send)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")
