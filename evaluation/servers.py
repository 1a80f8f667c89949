"""The inference servers of an evaluation: work goes to the least busy that lives, and moves on when its server dies.

A server is a router, an SGLang or a rollout node: all speak the same. What a dead one was doing is done again
elsewhere, so it costs time and nothing else. A server that answers again is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from services.clients.rollout import RolloutClient
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import RequestRefusedError, describe

T = TypeVar("T")

WATCH_SECONDS = 1.0
PROBE_SECONDS = 5.0
REFUSALS = 2
"""Probes in a row that cannot connect, after which a server counts as dead."""
SILENT_SECONDS = 60.0
"""A server that connects but does not answer well for that long counts as dead; a busy one may be slow."""
DISCOVER_SECONDS = 30.0
MAX_TRIES = 4
"""How often work is tried that servers lose although they live."""

Discover = Callable[[], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Address(Endpoint):
    """An endpoint given by its URL, which may have https or a path."""

    base: str = ""

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self.base


def parse_url(text: str) -> str:
    """``host:port`` or a URL as a base URL.

    Raises:
        ConfigurationError: it is neither.
    """
    base = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigurationError(f"{text!r} is no address; give one such as http://127.0.0.1:30000")
    return base


def address(url: str) -> Address:
    """A base URL as clients of this project take it."""
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), url)


@dataclass(eq=False)
class Server:
    """One server and what it is doing."""

    url: str
    rollouts: RolloutClient
    http: httpx.AsyncClient
    """For everything but /generate: connections are shared by all episodes."""
    is_alive: bool = False
    answered: float = -1e9
    refusals: int = 0
    problem: str = "not asked yet"
    jobs: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def is_usable(self) -> bool:
        """Whether work goes to it: it lives, and the last probe could connect."""
        return self.is_alive and not self.refusals


class ServerPool:
    """Runs work on servers. An async context manager, used within one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None,
        vocab_size: int,
        places: int,
        prompt_seconds: float,
        lost_seconds: float,
        discover: Discover | None = None,
        seed_each_completion: bool = False,
    ) -> None:
        """Makes a pool.

        Args:
            urls: of servers known from the start.
            token: sent as ``Authorization: Bearer``.
            vocab_size: ids of prompts must be below.
            places: pieces of work at one server at once.
            prompt_seconds: for one piece of work on one server.
            lost_seconds: how long no server at all may live before work fails.
            discover: asked for more URLs, now and then; what it no longer names is dropped once it is dead.
            seed_each_completion: as of ``RolloutClient``.
        """
        self.servers: dict[str, Server] = {}
        self.deaths = 0
        """How often a server that lived was found dead."""
        self.moved = 0
        """How often work was begun anew on another server."""
        self._given = list(urls)
        self._token = token
        self._vocab_size = vocab_size
        self._places = places
        self._prompt_seconds = prompt_seconds
        self._lost_seconds = lost_seconds
        self._discover = discover
        self._seed_each_completion = seed_each_completion
        self._evicted: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()
        self._alive_at = time.monotonic()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServerPool:
        for url in self._given:
            await self._add(url)
        self._watch = asyncio.create_task(self._watch_servers())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()

    @property
    def alive(self) -> list[Server]:
        """The servers that work goes to."""
        return [server for server in self.servers.values() if server.is_alive]

    async def wait_ready(self, seconds: float) -> None:
        """Returns when a server lives and takes our token.

        Raises:
            ConfigurationError: a server refuses the token.
            DependencyLostError: none lives within ``seconds``; the message says what each of them answers.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: bool(self.alive) or self._watch.done())
        except TimeoutError as error:
            raise DependencyLostError(f"no server answers within {seconds:g} s: {self._problems()}") from error
        if self._watch.done():
            await self._watch
        await asyncio.gather(*(self._check_token(server) for server in self.alive))

    async def run(self, work: Callable[[Server], Awaitable[T]]) -> T:
        """What ``work`` returns, on whichever server.

        Raises:
            DependencyLostError: no server lived for long, or all that were tried lost the work although they live.
            Exception: whatever else ``work`` raises.
        """
        tries = 0
        while True:
            async with self._place() as server:
                job = asyncio.ensure_future(work(server))
                server.jobs.add(job)
                try:
                    return await job
                except asyncio.CancelledError:
                    if job not in self._evicted:
                        raise
                except DependencyLostError:
                    # It may have died this moment, and that does not count.
                    await self._probe(server)
                    tries += server.is_usable
                    if tries >= MAX_TRIES:
                        raise
                finally:
                    server.jobs.discard(job)
                    self._evicted.discard(job)
                self.moved += 1

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[Server]:
        """A place at the least busy server, once there is one."""
        chosen: list[Server] = []

        def free() -> bool:
            chosen[:] = sorted(
                (s for s in self.servers.values() if s.is_usable and len(s.jobs) < self._places),
                key=lambda s: len(s.jobs),
            )[:1]
            return bool(chosen) or self._watch.done() or self._is_lost()

        async with self._changed:
            await self._changed.wait_for(free)
        if not chosen:
            if self._watch.done():
                await self._watch
            raise DependencyLostError(f"no server answers for {self._lost_seconds:g} s: {self._problems()}")
        try:
            yield chosen[0]
        finally:
            async with self._changed:
                self._changed.notify()

    async def _add(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
        rollouts = RolloutClient(
            address(url),
            self._token,
            vocab_size=self._vocab_size,
            max_concurrency=self._places,
            deadline_seconds=self._prompt_seconds,
            seed_each_completion=self._seed_each_completion,
        )
        http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(self._prompt_seconds, connect=PROBE_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=self._places + 8, keepalive_expiry=5.0),
            trust_env=False,
        )
        self.servers[url] = Server(
            url, await self._stack.enter_async_context(rollouts), await self._stack.enter_async_context(http)
        )

    async def _watch_servers(self) -> None:
        """Asks every server, again and again, whether it lives."""
        try:
            discovered = -1e9
            while True:
                if self._discover is not None and time.monotonic() - discovered > DISCOVER_SECONDS:
                    discovered = time.monotonic()
                    await self._find_more(self._discover)
                await asyncio.gather(*(self._probe(server) for server in self.servers.values()))
                if self.alive:
                    self._alive_at = time.monotonic()
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            # Those who wait find that nobody watches any more.
            async with self._changed:
                self._changed.notify_all()

    async def _find_more(self, discover: Discover) -> None:
        try:
            found = {parse_url(url) for url in await discover()}
        except DependencyLostError:
            # What is known stays; that no server lives at all is noticed elsewhere.
            return
        for url in sorted(found - set(self.servers)):
            await self._add(url)
        for url in [u for u, s in self.servers.items() if u not in found and u not in self._given and not s.is_alive]:
            del self.servers[url]

    async def _probe(self, server: Server) -> None:
        try:
            response = await server.http.get("/health", timeout=PROBE_SECONDS)
        except httpx.ConnectError as error:
            server.refusals += 1
            server.problem = describe(error)
        except httpx.HTTPError as error:
            server.problem = describe(error)
        else:
            server.refusals = 0
            if response.status_code == httpx.codes.OK:
                server.answered = time.monotonic()
                server.is_alive = True
                return
            server.problem = f"/health answers {response.status_code} {response.text[:100]}".strip()
        if server.refusals >= REFUSALS or time.monotonic() - server.answered > SILENT_SECONDS:
            self._bury(server)

    def _bury(self, server: Server) -> None:
        self.deaths += server.is_alive
        server.is_alive = False
        for job in server.jobs:
            self._evicted.add(job)
            job.cancel()

    async def _check_token(self, server: Server) -> None:
        response = await server.http.get("/v1/models")
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"{server.url} refuses the token ({response.status_code}); set JOBGROUP_TOKEN to the servers' own"
            )

    def _is_lost(self) -> bool:
        return not self.alive and time.monotonic() - self._alive_at > self._lost_seconds

    def _problems(self) -> str:
        told = [f"{server.url}: {server.problem}" for server in self.servers.values()]
        return "; ".join(told) or "discovery found none"


def refusal(error: RequestRefusedError) -> str:
    """Why a server refused a prompt, in words for a report."""
    return f"{error.status} {error.detail}"
