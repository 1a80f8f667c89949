"""The router's authenticating proxy: ``python -m services.rollout_server.auth_proxy --host H --port P --router URL``.

The router does not ask for the token on some of its routes, which show the served model and the engines' metrics. So
with JOBGROUP_TOKEN it listens to its own node only, and this proxy in front of it forwards requests with the token, in
as many processes as ``--processes`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from services.core import logs
from services.core.child import LAUNCHER_VARIABLE, end_with_launcher
from services.core.errors import ConfigurationError, exit_code_of
from services.engines.settings import RolloutSettings
from services.http import problems
from services.http.app import ServiceMiddleware
from services.http.client import Pools
from services.http.problems import problem_response
from services.http.server import ended_before_client_left, listen, server_config

SERVICE = "router"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
CONNECT_SECONDS = 5.0
DRAIN_SECONDS = 3
HUNG_SECONDS = 60
"""One of several processes that does not answer the main one for that long is replaced. A new one answers only once it
has imported everything."""
# Headers that belong to one connection, not to the message.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)


def create_app(router_url: str, token: str) -> ASGIApp:
    """Return an application that forwards requests with the token to the router, and /health for everybody."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Router and clients limit the number of requests and their time.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        async with httpx.AsyncClient(base_url=router_url, transport=Pools(router_url), timeout=timeout) as client:
            app.state.client = client
            yield

    async def forward(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        try:
            path, query = request.scope["raw_path"], request.scope["query_string"]
            # Unchanged: a %2F in a path is not a slash.
            target = httpx.URL(raw_path=path + b"?" + query if query else path)
        except (httpx.InvalidURL, UnicodeDecodeError) as error:
            return problem_response(400, f"the path cannot be forwarded: {error}")
        headers, content = _end_to_end(request.headers.raw), await request.body() or None
        outgoing = client.build_request(request.method, target, headers=headers, content=content)
        sending = asyncio.create_task(client.send(outgoing, stream=True))
        try:
            # The router and its worker may stop, too, when the client has left.
            if not await ended_before_client_left(request, sending):
                return Response(status_code=499)
            answer = sending.result()
        except httpx.TransportError as error:
            return problem_response(503, f"the router does not answer: {error!r}", headers={"Retry-After": "1"})
        finally:
            sending.cancel()
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
        response.raw_headers = _end_to_end(answer.headers.raw)
        return response

    app = Starlette(lifespan=lifespan)
    problems.install(app)
    app.add_route("/{path:path}", forward, methods=METHODS)
    return ServiceMiddleware(app, service=SERVICE, token=token, is_ready=lambda: True)


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers without those of one connection."""
    return [(name.lower(), value) for name, value in headers if name.lower().decode("latin-1") not in _HOP_BY_HOP]


def process_app(router_url: str, token: str, log_level: str) -> ASGIApp:
    """Return ``create_app``'s application in a process of its own, which ends when the main process has ended."""
    end_with_launcher()
    logs.configure(SERVICE, log_level)
    return create_app(router_url, token)


def main() -> None:
    """Read the command line and the environment, and serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout_server.auth_proxy")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int, help="port to listen on")
    parser.add_argument("--router", required=True, help="the router's URL, as this node reaches it")
    parser.add_argument("--processes", default=1, type=int, help="processes that share the requests")
    arguments = parser.parse_args()
    settings = RolloutSettings.load()
    logs.configure(SERVICE, settings.log_level)
    if settings.token is None:
        raise ConfigurationError("JOBGROUP_TOKEN is not set; without a token the router needs no proxy")
    listener = listen(arguments.host, arguments.port)
    options = {"timeout_graceful_shutdown": DRAIN_SECONDS, "date_header": False}
    if arguments.processes == 1:
        app = create_app(arguments.router, settings.token)
        uvicorn.Server(server_config(app, **options)).run(sockets=[listener])
    else:
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        make = partial(process_app, arguments.router, settings.token, settings.log_level)
        options["timeout_worker_healthcheck"] = HUNG_SECONDS
        config = server_config(make, factory=True, workers=arguments.processes, **options)
        Multiprocess(config, [listener]).run()


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
