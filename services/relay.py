"""A relay for programs: it forwards their requests to a URL of this machine through the HTTP client of their episode.

That client waits for a gateway that restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self, TypeVar, Unpack

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

from services.agents import AgentFailedError, Endpoint, Example, Program, privilege_drop
from services.http.client import problem_detail
from services.http.server import ended_before_client_left, serving

_OF_ONE_CONNECTION = frozenset({"connection", "content-encoding", "content-length", "host", "transfer-encoding"})
"""Headers that are not passed on; the client decodes and frames the content itself."""
_NO_CALL = (404, 405)
"""Statuses of requests that are no call of the model, such as for an account."""

T = TypeVar("T")


@dataclass
class _Target:
    base_url: str
    api_key: str
    http_client: httpx.AsyncClient
    sent: set[asyncio.Task[httpx.Response]] = field(default_factory=set)
    """Requests without an answer yet."""
    refusal: asyncio.Future[Exception] = field(default_factory=asyncio.Future)
    """The error of the first call that failed."""
    has_answers: bool = False

    def note(self, reply: httpx.Response) -> None:
        """Keep whether a call was answered; the conversation of one that was not may have outgrown the context."""
        if not reply.is_error:
            self.has_answers |= reply.request.method == "POST"
        elif reply.status_code not in _NO_CALL:
            outgrew = self.has_answers and "context_length_exceeded" in reply.text
            fault = "server" if reply.is_server_error else "exception"
            self.fail(problem_detail(reply), "limit" if outgrew else fault)

    def fail(self, why: str, reason: str) -> None:
        """Keep why a call failed, if it is the first one."""
        if not self.refusal.done():
            self.refusal.set_result(AgentFailedError(f"the program is ended, because its call failed: {why}", reason))


class Relay:
    """A server whose paths begin with an episode's own key, so that a program sees no token of the servers'.

    An agent, and an async context manager: the server runs within the context. With ``socket`` it has a UNIX socket of
    that path in place of a port, and ``url`` is where the programs of a box find it.
    """

    def __init__(self, program: Program | None = None, *, socket: str | None = None, url: str = "") -> None:
        self.program = program
        self.has_answered = False
        """True once a call of the model was answered."""
        self._targets: dict[str, _Target] = {}
        self._socket, self._url = socket, url
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.program is not None:
            privilege_drop()  # The start, not the first episode, logs where there is none.
        app = FastAPI(openapi_url=None)
        app.add_api_route("/{key}/v1/{path:path}", self._pass_on, methods=["GET", "POST"], response_model=None)
        served = await self._stack.enter_async_context(serving(app, self._socket))
        self._url = self._url or served
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def __call__(self, example: Example, **endpoint: Unpack[Endpoint]) -> float | None:
        """Let the program answer ``example``, as an agent; raises as the program does."""
        program, client = self.program, endpoint["http_client"]
        assert program is not None

        def work(url: str, key: str) -> Awaitable[float | None]:
            return program(example, base_url=url, api_key=key, http_client=client)

        return await self.serve(work, ends_when_refused=program.ends_when_refused, **endpoint)

    async def serve(
        self, work: Callable[[str, str], Awaitable[T]], *, ends_when_refused: bool, **endpoint: Unpack[Endpoint]
    ) -> T:
        """Return the result of work that gets a URL and a key, by which its program reaches ``base_url``.

        Raises:
            AgentFailedError: a call was refused, and ``ends_when_refused``.
        """
        key = secrets.token_hex(16)
        target = self._targets[key] = _Target(**endpoint)
        try:
            playing = asyncio.ensure_future(work(f"{self._url}/{key}/v1", key))
            if ends_when_refused:
                target.refusal.add_done_callback(lambda _: playing.cancel())
            return await playing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not target.refusal.done() or (task is not None and task.cancelling()):
                raise
            raise target.refusal.result() from None
        finally:
            del self._targets[key]
            for request in target.sent:
                request.cancel()

    async def _pass_on(self, key: str, path: str, request: Request) -> Response:
        """Send a request on, and return the reply as it comes; 404 for an unknown key, 502 if no reply comes."""
        target = self._targets.get(key)
        # The session has further routes above, which give its reward and end it.
        if target is None or ".." in path.split("/"):
            return Response(status_code=404)
        credentials = ("authorization", "x-api-key")
        headers = {k: v for k, v in request.headers.items() if k not in _OF_ONE_CONNECTION and k not in credentials}
        headers["authorization"] = f"Bearer {target.api_key}"
        url = httpx.URL(f"{target.base_url}/{path}", query=request.url.query.encode() or None)
        forwarded = httpx.Request(request.method, url, headers=headers, content=await request.body())
        sending = asyncio.create_task(target.http_client.send(forwarded, stream=True))
        target.sent.add(sending)
        sending.add_done_callback(target.sent.discard)
        try:
            if not await ended_before_client_left(request, sending):
                # Closes the connection to the gateway, which gives its reply to the program's next attempt.
                sending.cancel()
            reply = await sending
        except asyncio.CancelledError:
            return Response("the episode has ended, or the program has left", 502)
        except httpx.TransportError as error:
            target.fail(f"{type(error).__name__}: {error}", "server")
            return Response(f"{type(error).__name__}: {error}", 502)
        if reply.is_error:
            await reply.aread()
        target.note(reply)
        self.has_answered |= target.has_answers
        reply_headers = {k: v for k, v in reply.headers.items() if k not in _OF_ONE_CONNECTION}
        return StreamingResponse(
            reply.aiter_bytes(), reply.status_code, reply_headers, background=BackgroundTask(reply.aclose)
        )
