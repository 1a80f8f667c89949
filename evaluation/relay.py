"""A relay for programs: their requests to a URL of this machine go on through the recording client of their episode."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

from services.agents import Agent, Example
from services.programs import Program

_OF_ONE_CONNECTION = frozenset({"connection", "content-encoding", "content-length", "host", "transfer-encoding"})
"""Headers that are not passed on; the client decodes and frames the content itself."""


@dataclass(frozen=True)
class _Target:
    base_url: str
    api_key: str
    client: httpx.AsyncClient


@dataclass
class Relay:
    """A server whose paths begin with an episode's own key, so that a program sees no token of the servers'."""

    program: Program
    port: int
    _targets: dict[str, _Target] = field(default_factory=dict)

    async def __call__(
        self, example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient
    ) -> float | None:
        """Let the program answer ``example``, as an agent; raises as the program does."""
        key = secrets.token_hex(16)
        self._targets[key] = _Target(base_url.removesuffix("/v1"), api_key, http_client)
        try:
            own_url = f"http://127.0.0.1:{self.port}/{key}/v1"
            return await self.program(example, base_url=own_url, api_key=key, http_client=http_client)
        finally:
            del self._targets[key]

    async def pass_on(self, key: str, path: str, request: Request) -> Response:
        """Send a request on, and return the reply as it comes; 404 for a key of no episode, 502 if no reply comes."""
        target = self._targets.get(key)
        if target is None:
            return Response(status_code=404)
        own = ("authorization", "x-api-key")
        headers = {k: v for k, v in request.headers.items() if k not in _OF_ONE_CONNECTION and k not in own}
        headers["authorization"] = f"Bearer {target.api_key}"
        passed = httpx.Request(
            request.method, f"{target.base_url}/{path}", headers=headers, content=await request.body()
        )
        try:
            reply = await target.client.send(passed, stream=True)
        except httpx.TransportError as error:
            return Response(f"{type(error).__name__}: {error}", 502)
        kept = {k: v for k, v in reply.headers.items() if k not in _OF_ONE_CONNECTION}
        return StreamingResponse(reply.aiter_bytes(), reply.status_code, kept, background=BackgroundTask(reply.aclose))


@contextlib.asynccontextmanager
async def reachable(agent: Agent | None) -> AsyncIterator[Agent | None]:
    """Yield an agent that reaches the servers: a program by a relay, which runs meanwhile; any other as it is."""
    if not isinstance(agent, Program):
        yield agent
        return
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        relay = Relay(agent, listener.getsockname()[1])
        app = FastAPI(openapi_url=None)
        app.add_api_route("/{key}/{path:path}", relay.pass_on, methods=["GET", "POST"], response_model=None)
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # Ctrl-C is ours
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield relay
        finally:
            server.should_exit = True
            await serving
