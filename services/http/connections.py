"""The configuration of uvicorn, the HTTP server of every service."""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# SGLang's router tries gRPC with each new worker.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"


class _Protocol(HttpToolsProtocol):
    """A connection that refuses HTTP/2 without uvicorn's warning of an invalid request."""

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self.scope is None and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not spoken here; send HTTP/1.1")
            return
        super().data_received(data)


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
