"""A client of OpenAI's streaming API that costs little, since it shares the machine with what it measures."""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

_LARGEST_ERROR = 1000


@dataclass
class Outcome:
    """What became of one request. Times are in seconds since the benchmark began; `events` are those with text.

    `error` is None for a request that has ended as it should; `left` for one that was ended by its client.
    """

    started: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    left: bool = False

    @property
    def ttft(self) -> float:
        return self.events[0] - self.started

    @property
    def e2e(self) -> float:
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between events; one may bring several tokens."""
        return [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]


class Client:
    """Sends bodies to one URL, each over a connection of its own."""

    def __init__(self, base_url: str, path: str, *, api_key: str | None = None, timeout: float = 600.0):
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url={base_url!r}: base_url must be http://HOST:PORT or https://HOST:PORT")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._address = url.hostname, url.port or (443 if self._tls else 80)
        self._timeout = timeout
        head = f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"{head}Connection: close\r\nContent-Length: "

    async def stream(self, body: dict[str, Any], origin: float, *, leave_after: int | None = None) -> Outcome:
        """Send a body and read its stream to the end, or leave after so many events. `origin`: when time began."""
        outcome = Outcome(time.perf_counter() - origin)
        reading = None
        try:
            async with asyncio.timeout(self._timeout):
                reading = _Reading(outcome, origin, leave_after)
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: reading, *self._address, ssl=self._tls
                )
                sent = json.dumps(body).encode()
                transport.write(f"{self._head}{len(sent)}\r\n\r\n".encode() + sent)
                await reading.done
        except TimeoutError:
            outcome.error = f"no end after {self._timeout:g} s"
        except OSError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            outcome.ended = time.perf_counter() - origin
            if reading is not None:
                reading.leave()
        return outcome


class _Reading(asyncio.Protocol):
    """One response: server-sent events into an outcome."""

    def __init__(self, outcome: Outcome, origin: float, leave_after: int | None):
        self._outcome, self._origin, self._leave_after = outcome, origin, leave_after
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:  # no HTTP, or no JSON in it: whatever comes from the other side is told
            self._finish(f"{type(error).__name__}: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(f"the connection was closed: {error}")

    def on_headers_complete(self) -> None:
        self._outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._outcome.status != 200:
            self._rest += body[:_LARGEST_ERROR]
            return
        *lines, self._rest = (self._rest + body).split(b"\n\n")
        now = time.perf_counter() - self._origin
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                self._take(json.loads(line[6:]), now)

    def on_message_complete(self) -> None:
        status = self._outcome.status
        if status != 200:
            self._finish(f"status {status}: {self._rest.decode(errors='replace')}")
        else:
            self._finish(None if self._outcome.finish_reason else self._outcome.error or "it ended without a reason")

    def _take(self, event: dict[str, Any], now: float) -> None:
        outcome = self._outcome
        if "error" in event:
            self._finish(str(event["error"]))
            return
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text or choice.get("finish_reason"):
                outcome.events.append(now)
                outcome.text += text or ""
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        if usage := event.get("usage"):
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if self._leave_after is not None and len(outcome.events) >= self._leave_after:
            outcome.left = True
            self._finish(None)

    def _finish(self, error: str | None) -> None:
        if not self.done.done():
            self._outcome.error = error
            self.done.set_result(None)
