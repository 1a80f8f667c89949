"""A fake HTTP service with a test's replies, which records its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE, ROUTER_PORT, Endpoint
from services.protocol.replay import GROUPS_TYPE, AddGroupsRequest, unframed

Route = Callable[[dict[str, Any]], Any]
"""Returns the reply to a request's JSON or query; an integer is a status without a body, a tuple a status with one.

A tuple of three has headers, too; a body of text is sent as it is.
"""


@dataclass
class FakeService:
    """A fake service. Routes have names such as ``POST /reward``; the service answers 404 for other routes."""

    endpoint: Endpoint
    routes: dict[str, Route]
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def asked(self, route: str) -> list[dict[str, Any]]:
        """Return the requests to a route, in order."""
        return [request for name, request in self.requests if name == route]


@contextmanager
def fake_service(routes: dict[str, Route]) -> Iterator[FakeService]:
    """Serve ``routes``, which may change meanwhile, until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Type") == GROUPS_TYPE:
                request = AddGroupsRequest.model_validate(unframed(body)).model_dump(mode="json")
            else:
                request = json.loads(body) if body else dict(parse_qsl(url.query))
            name = f"{self.command} {url.path}"
            service.requests.append((name, request))
            route = service.routes.get(name)
            reply = 404 if route is None else route(request)
            if not isinstance(reply, tuple):
                reply = (reply, {"detail": "as the test says"}) if isinstance(reply, int) else (200, reply)
            status, content, *headers = reply
            encoded = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json"} | (headers[0] if headers else {})).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = FakeService(Endpoint("127.0.0.1", server.server_port), routes)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def name_router(router: FakeService, monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    """Have clients find a service as the job group's router; ``others`` are nodes' addresses by name and port."""
    address = f"{router.endpoint.host}:{router.endpoint.port}"
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"rollout-server-0:{ROUTER_PORT}": address, **others}))
