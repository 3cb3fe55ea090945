"""The server's process: one socket, uvicorn, signals, and an exit status."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from jaxserve.server.app import create_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.connection import Connection
from jaxserve.server.endpoint import LAST_WORDS_SECONDS
from jaxserve.server.service import Service

_log = logging.getLogger("jaxserve.server")

KEEP_ALIVE_SECONDS = 30
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn's server with this program's ends.

    The first signal stops accepting and lets what runs go on for `shutdown_timeout`; the second ends the process at
    once. The service's own end (its engine has failed) is the server's.
    """

    def __init__(self, service: Service):
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(config.shutdown_timeout + 3 * LAST_WORDS_SECONDS) + 1,
            )
        )
        self._service = service

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._end_with_the_service())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    async def _end_with_the_service(self) -> None:
        await self._service.ended.wait()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _) -> None:
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        _log.info("stopping: %d answers are under way", self._service.num_open)
        self._service.stop()
        self._loop.call_later(self._service.config.shutdown_timeout, self._service.end_requests)


def listen(config: ServerConfig) -> socket.socket:
    """The socket to serve, bound before anything is loaded. ValueError if that cannot be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"port={config.port}: cannot listen at {config.host}: {error.strerror or error}") from None


def serve(service: Service) -> int:
    """Serve until a signal or the engine's end; returns the exit status. ValueError if the port is taken."""
    listening = listen(service.config)
    host, port = listening.getsockname()[:2]
    _log.info("listening at http://%s:%d", f"[{host}]" if ":" in host else host, port)
    server = Server(service)
    with suppress(KeyboardInterrupt), listening:
        server.run(sockets=[listening])
    status = 0 if service.error is None else 1
    if service.starting:  # its thread is deep in a compiler, and waiting for it would be waiting for the model
        logging.shutdown()
        os._exit(status)
    return status
