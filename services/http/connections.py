"""The HTTP server of every service: uvicorn, with a bound on the time that a client takes over a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The head of a request is a few hundred bytes, and a client that has connected has it ready.
HEAD_SECONDS = 20.0

# SGLang's router asks each new worker whether it speaks gRPC.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when the head of a request takes longer than HEAD_SECONDS to arrive.

    The time runs from the connection's beginning, later from the first byte of each request; uvicorn's
    ``timeout_keep_alive`` bounds the time between two requests.
    """

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take what came; refuse HTTP/2 without the warning that uvicorn logs for what is no HTTP."""
        if self.scope is None and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not spoken here; send HTTP/1.1")
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin to wait for the head whose first byte came."""
        super().on_message_begin()
        if self._head_deadline is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Stop waiting for the head, which is whole."""
        self._forget_deadline()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _give_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The connection may be read no further until the request before is answered: it is we who are late.
            self._expect_head()
        else:
            self.transport.close()


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration of a service; ``options`` are further ones of uvicorn's."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        **options,
    )
