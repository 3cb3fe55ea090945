"""uvicorn's connections, made safe from clients that send or read too slowly."""

import asyncio
from typing import Any, no_type_check

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEADERS_SECONDS = 20.0  # what a client may take to send the head of a request
HEADERS_BYTES = 2**16


class Connection(HttpToolsProtocol):
    """Closes a connection on which the head of a request takes too long or is too large.

    Applications find the transport in `scope["state"]["transport"]`: what a client does not read keeps a connection
    open after it is closed, and only `abort` ends it.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, dict(app_state), _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    @no_type_check  # uvloop's transports are no asyncio.Transport
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state["transport"] = transport
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_deadline()
            return
        if self.transport.is_closing():
            return  # the rest of a body that nobody reads
        self._await_head()
        self._head_bytes += len(data)
        if self._head_bytes > HEADERS_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEADERS_SECONDS, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._head_bytes = None, 0
