"""The router's door: ``python -m services.rollout_server.auth_proxy --host H --port P --router HOST:PORT``.

The router itself asks nobody for the token on some of its routes, which tell what is served and the engines' metrics.
So with JOBGROUP_TOKEN it listens to its own node alone, and this process in front of it lets in who has the token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from services.core import logs
from services.core.errors import ConfigurationError, exit_code_of
from services.http.connections import server_config
from services.http.middleware import ServiceMiddleware
from services.http.problems import problem_response
from services.http.server import listen
from services.rollout_server.settings import RolloutSettings

SERVICE = "router"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CONNECT_SECONDS = 5.0
DRAIN_SECONDS = 3
# Of one connection, not of a message.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)


def create_app(router_url: str, token: str) -> ASGIApp:
    """An application that passes on to the router what carries the token; /health is for everybody."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # How many requests and how long is for the router to say, and for the clients.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        async with httpx.AsyncClient(base_url=router_url, limits=limits, timeout=timeout, trust_env=False) as client:
            app.state.client = client
            yield

    async def pass_on(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        try:
            target = httpx.URL(raw_path=_raw_target(request))
        except (httpx.InvalidURL, UnicodeDecodeError) as error:
            return problem_response(400, f"the path cannot be passed on: {error}")
        outgoing = client.build_request(
            request.method,
            target,
            headers=_passed(request.headers.raw),
            content=await request.body() or None,
        )
        try:
            answer = await _unless_gone(request, client.send(outgoing, stream=True))
        except httpx.TransportError as error:
            return problem_response(503, f"the router does not answer: {error!r}", headers={"Retry-After": "1"})
        if answer is None:
            return Response(status_code=499)
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
        response.raw_headers = _passed(answer.headers.raw)
        return response

    app = Starlette(lifespan=lifespan)
    app.add_route("/{path:path}", pass_on, methods=list(METHODS))
    return ServiceMiddleware(app, service=SERVICE, token=token, is_ready=lambda: True)


def _raw_target(request: Request) -> bytes:
    """Path and query as they came: a %2F in a path is not a slash."""
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return path + b"?" + query if query else path


def _passed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower().decode("latin-1") not in _HOP_BY_HOP]


async def _unless_gone(request: Request, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response | None:
    """The answer; None when the client left before, whereupon the router and its worker may stop too."""
    answer = asyncio.create_task(sending)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    """Reads the command line and the environment, and serves until a signal."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout_server.auth_proxy")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int, help="port to listen on")
    parser.add_argument("--router", required=True, help="the router's URL, as this node reaches it")
    arguments = parser.parse_args()
    settings = RolloutSettings.load()
    logs.configure(SERVICE, settings.log_level)
    if settings.token is None:
        raise ConfigurationError("JOBGROUP_TOKEN is not set; without a token the router needs no door")
    listener = listen(arguments.host, arguments.port)
    app = create_app(arguments.router, settings.token)
    config = server_config(app, timeout_graceful_shutdown=DRAIN_SECONDS, date_header=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
