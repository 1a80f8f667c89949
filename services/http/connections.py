"""The configuration of uvicorn, the HTTP server of every service."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# SGLang's router tries gRPC with each new worker.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"

REQUEST_SECONDS = 60.0
"""Time for the headers of a request, and for each next piece of its body."""


class _Protocol(HttpToolsProtocol):
    """A connection that refuses HTTP/2 without uvicorn's warning, and closes when no whole request comes in time."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._set_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for a request."""
        super().connection_lost(exc)
        self._set_limit()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self.scope is None and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not spoken here; send HTTP/1.1")
            return
        super().data_received(data)
        self._set_limit()

    def _set_limit(self) -> None:
        """Limit the wait for the client: once for all the bytes of the headers, anew for each next piece of a body."""
        is_open = self in self.connections  # No longer when it is lost, or has become a WebSocket.
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._limit is not None:
            if is_open and not is_answering:
                return
            self._limit.cancel()
            self._limit = None
        if is_open and not (is_answering and not self.cycle.more_body):
            self._limit = self.loop.call_later(REQUEST_SECONDS, self._close_late)

    def _close_late(self) -> None:
        self._limit = None
        # Not the client but the service is late, which has yet to read the body.
        if self.flow.read_paused or (self.cycle is not None and self.cycle.waiting_for_100_continue):
            self._set_limit()
        else:
            self.transport.close()


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of a service; ``options`` are passed on to uvicorn."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        **options,
    )
