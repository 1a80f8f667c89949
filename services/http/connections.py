"""The HTTP server of every service: uvicorn, with a limit to the time that the head of a request takes to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0
"""The head of a request is a few hundred bytes, and a client has it ready when it connects."""

# SGLang's router tries gRPC with each new worker.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection that closes when the head of a request takes longer than HEAD_SECONDS to arrive.

    The time starts with the connection, and for later requests with their first byte; uvicorn's ``timeout_keep_alive``
    bounds the time between two requests.
    """

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the time for the first request."""
        super().connection_made(transport)
        self._start_time()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse HTTP/2 without uvicorn's warning of an invalid request."""
        if self.scope is None and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not spoken here; send HTTP/1.1")
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the time for a request whose first byte came."""
        super().on_message_begin()
        if self._head_deadline is None:
            self._start_time()

    def on_headers_complete(self) -> None:
        """Stop the time: the head is complete."""
        self._stop_time()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_time()
        super().connection_lost(exc)

    def _start_time(self) -> None:
        self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._on_timeout)

    def _stop_time(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _on_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The server reads the next request only when it has answered this one: the delay is ours.
            self._start_time()
        else:
            self.transport.close()


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of a service; ``options`` are passed on to uvicorn."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        **options,
    )
