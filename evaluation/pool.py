"""A pool of inference servers: work goes to the least busy live server, and moves to another when its server dies.

The unfinished work of a dead server is done again elsewhere, so a death costs time and nothing else. A server that
answers again is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evaluation.server import ADMISSION_SECONDS, Server, parse_url
from services.clients.rollout import ROUTING_KEY
from services.core.errors import DependencyLostError
from services.http.client import describe
from services.http.server import ended_before_client_left, serving
from services.protocol.base import derive_seed

T = TypeVar("T")

LOST_SECONDS = 600.0
"""The evaluation gives up after no server, or no reward-server, has answered for this long. Within that
time, a node that is replaced on a cluster is back."""
WATCH_SECONDS = 1.0
PROBE_SECONDS = 5.0
REFUSALS = 2
"""A server counts as dead after this many probes in a row could not connect."""
SILENT_SECONDS = 60.0
"""A server that accepts connections counts as dead after this long without a good answer; a busy one may be slow."""
DISCOVER_SECONDS = 30.0
MAX_TRIES = 4
"""Tries of a piece of work that servers lose although they live."""

Discover = Callable[[], Awaitable[Sequence[str]]]


class ServerPool:
    """Servers that share work. An async context manager, used within one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Server],
        *,
        places: int,
        discover: Discover | None = None,
    ) -> None:
        """Make a pool.

        Args:
            urls: servers known from the start.
            connect: makes the server of a URL.
            places: pieces of work at one server at once.
            discover: returns the URLs of more servers, and is asked now and then; a dead server that it no longer names
                is dropped.
        """
        self.servers: dict[str, Server] = {}
        self.deaths = 0
        """Number of times that a live server was found dead."""
        self.moved = 0
        """The number of times that work was repeated on another server."""
        self._urls = urls
        self._connect = connect
        self._places = places
        self._discover = discover
        self._evicted: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()
        self._alive_at = time.monotonic()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServerPool:
        for url in self._urls:
            await self._add(url)
        self._watch = asyncio.create_task(self._watch_servers())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()

    @property
    def alive(self) -> list[Server]:
        """The live servers."""
        return [server for server in self.servers.values() if server.is_alive]

    async def wait_ready(self, seconds: float) -> None:
        """Wait until a server lives and takes our requests.

        Raises:
            ConfigurationError: a server does not take them.
            DependencyLostError: no server lives within ``seconds``; the message has the answer of each.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: bool(self.alive) or self._watch.done())
        except TimeoutError as error:
            raise DependencyLostError(f"no server answers within {seconds:g} s: {self._problems()}") from error
        if self._watch.done():
            await self._watch

    async def run(self, work: Callable[[Server], Awaitable[T]], *, key: str = "", tries: int = MAX_TRIES) -> T:
        """Return the result of ``work`` on any of the servers.

        Args:
            work: what to do at a server.
            key: work of the same key goes to the same server while that has a place; "": to the least busy one.
            tries: live servers may lose the work this often.

        Raises:
            DependencyLostError: no server lived for LOST_SECONDS, or live servers lost the work.
            Exception: any other error of ``work``.
        """
        while True:
            async with self._place(key) as server:
                job = asyncio.ensure_future(work(server))
                server.jobs.add(job)
                try:
                    return await job
                except asyncio.CancelledError:
                    # Both at once: the evaluation ends, and the server was found dead.
                    current = asyncio.current_task()
                    if job not in self._evicted or (current is not None and current.cancelling()):
                        raise
                except DependencyLostError:
                    # The server may have died this moment, which does not count as a try.
                    await self._probe(server)
                    tries -= server.is_usable
                    if tries <= 0:
                        raise
                finally:
                    server.jobs.discard(job)
                    self._evicted.discard(job)
                self.moved += 1

    @contextlib.asynccontextmanager
    async def _place(self, key: str) -> AsyncIterator[Server]:
        """Wait for a free place, and yield the server of ``key``, or the least busy one."""
        async with self._changed:
            while not (free := [s for s in self.servers.values() if s.is_usable and len(s.jobs) < self._places]):
                self._check()
                await self._changed.wait()
        try:
            yield min(free, key=lambda server: derive_seed(key, server.url) if key else len(server.jobs))
        finally:
            async with self._changed:
                self._changed.notify()

    async def watch(self) -> None:
        """Raise an error once servers do not take our requests, or none has lived for LOST_SECONDS."""
        while True:
            self._check()
            await asyncio.sleep(WATCH_SECONDS)

    def _check(self) -> None:
        if self._watch.done():
            self._watch.result()
        if not self.alive and time.monotonic() - self._alive_at > LOST_SECONDS:
            raise DependencyLostError(f"no server answers for {LOST_SECONDS:g} s: {self._problems()}")

    @contextlib.asynccontextmanager
    async def engine(self, token: str | None) -> AsyncIterator[str]:
        """Serve /generate, for callers with the token, as one engine made of all servers; yield its URL."""

        async def generate(request: Request) -> Response:
            if token and not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {token}"):
                return Response("JOBGROUP_TOKEN is needed", 401)
            body, key = await request.json(), request.headers.get(ROUTING_KEY, "")

            async def ask(server: Server) -> httpx.Response:
                headers, seconds = {ROUTING_KEY: key}, server.client.deadline
                return await server.client.send_once("POST", "/generate", body, headers=headers, seconds=seconds)

            # The gateway asks again, as another request: an engine may still be busy with the one that was lost.
            asked = asyncio.create_task(self.run(ask, key=key, tries=1))
            try:
                if not await ended_before_client_left(request, asked):
                    asked.cancel()
                reply = await asked
            except DependencyLostError as error:
                return Response(str(error), 503)
            except asyncio.CancelledError:
                return Response("the gateway has left", 503)
            return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

        async with serving(Starlette(routes=[Route("/generate", generate, methods=["POST"])])) as url:
            yield url

    async def _add(self, url: str) -> None:
        self.servers[url] = await self._stack.enter_async_context(self._connect(url))

    async def _watch_servers(self) -> None:
        """Probe every server every WATCH_SECONDS, and discover new ones, until cancelled."""
        try:
            discovered = -1e9
            while True:
                is_due = not self.alive or time.monotonic() - discovered > DISCOVER_SECONDS
                if self._discover is not None and is_due:
                    discovered = time.monotonic()
                    await self._find_more(self._discover)
                await asyncio.gather(*(self._probe(server) for server in self.servers.values() if server.is_due))
                if self.alive:
                    self._alive_at = time.monotonic()
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            # Wakes the waiting work, which then raises the error of this task.
            async with self._changed:
                self._changed.notify_all()

    async def _find_more(self, discover: Discover) -> None:
        try:
            discovered_urls = {parse_url(url).url for url in await discover()}
        except DependencyLostError:
            return  # the known servers stay; the loss of all of them is noticed elsewhere
        for url in sorted(discovered_urls - set(self.servers)):
            await self._add(url)
        for url, server in list(self.servers.items()):
            if url not in discovered_urls and url not in self._urls and not server.is_alive:
                del self.servers[url]

    async def _probe(self, server: Server) -> None:
        """Ask a server whether it lives; the first time that it does, whether it takes our requests.

        Raises:
            ConfigurationError: it does not take them.
        """
        try:
            response = await server.client.send_once("GET", server.probe_path, seconds=PROBE_SECONDS)
            server.refusals = 0
            if server.is_good(response):
                if not server.is_admitted:
                    async with asyncio.timeout(ADMISSION_SECONDS):
                        await server.admit()
                server.is_admitted = server.is_alive = True
                server.answered = time.monotonic()
                # At once, since the probe of another server may take long.
                async with self._changed:
                    self._changed.notify_all()
                return
            server.problem = f"{server.probe_path} answers {response.status_code} {response.text[:100]}".strip()
        except TimeoutError:
            server.problem = f"{server.probe_path} answers, but a first prompt takes more than {ADMISSION_SECONDS:g} s"
        except DependencyLostError as error:
            server.refusals += isinstance(error.__cause__, httpx.ConnectError)
            server.problem = describe(error.__cause__ or error)
        if server.refusals >= REFUSALS or time.monotonic() - server.answered > SILENT_SECONDS:
            self.deaths += server.is_alive
            server.is_alive = False
            for job in server.jobs:
                self._evicted.add(job)
                job.cancel()

    def _problems(self) -> str:
        problems = [f"{server.url}: {server.problem}" for server in self.servers.values()]
        return "; ".join(problems) or "discovery found none"
