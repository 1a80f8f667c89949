"""A pool of inference servers: work goes to the least busy live server, and moves to another when its server dies.

A server is a router, an SGLang or a rollout node; all have the same routes. The unfinished work of a dead server is
done again elsewhere, so a death costs time and nothing else. A server that answers again is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import HttpUrl, TypeAdapter, ValidationError

from evaluation.settings import EvaluationSettings
from services.clients.rollout import RolloutClient
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import describe

T = TypeVar("T")

PROMPT_SECONDS = 600.0
"""The longest time that one prompt or episode may take at one server."""
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


@dataclass(frozen=True)
class UrlEndpoint(Endpoint):
    """An endpoint given by its URL, which may have https or a path."""

    base_url: str = ""

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self.base_url


def parse_url(text: str) -> UrlEndpoint:
    """Return the endpoint of ``host:port`` or of a URL.

    Raises:
        ConfigurationError: ``text`` is neither.
    """
    base = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    try:
        url = TypeAdapter(HttpUrl).validate_python(base)
    except ValidationError as error:
        raise ConfigurationError(f"{text!r} is no address; give one such as http://127.0.0.1:30000") from error
    return UrlEndpoint(url.host or "", url.port or 80, base)


@dataclass(eq=False)
class Server:
    """One server and its work."""

    url: str
    rollouts: RolloutClient
    http: httpx.AsyncClient
    """The client for all routes but /generate; all episodes share its connections."""
    adapter: str | None = None
    """The LoRA adapter that requests name, if the server has one."""
    is_alive: bool = False
    answered: float = -1e9
    refusals: int = 0
    problem: str = "not asked yet"
    jobs: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def is_usable(self) -> bool:
        """Return whether the server gets work: it lives, and the last probe could connect."""
        return self.is_alive and not self.refusals


class ServerPool:
    """Servers that share work. An async context manager, used within one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: EvaluationSettings,
        vocab_size: int,
        discover: Discover | None = None,
    ) -> None:
        """Make a pool.

        Args:
            urls: servers known from the start.
            settings: token, work at one server at once, and whether engines are deterministic.
            vocab_size: token ids of prompts must be below.
            discover: returns the URLs of more servers, and is asked now and then; a dead server that it no longer names
                is dropped.
        """
        self.servers: dict[str, Server] = {}
        self.deaths = 0
        """Number of times that a live server was found dead."""
        self.moved = 0
        """How often work was begun anew on another server."""
        self._given = urls
        self._settings = settings
        self._vocab_size = vocab_size
        self._discover = discover
        self._adapter: str | None = None
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
        """The live servers."""
        return [server for server in self.servers.values() if server.is_alive]

    async def wait_ready(self, seconds: float) -> None:
        """Wait until a server lives and accepts our token.

        Raises:
            ConfigurationError: a server refuses the token.
            DependencyLostError: no server lives within ``seconds``; the message has the answer of each.
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
        """Return the result of ``work`` on any of the servers.

        Raises:
            DependencyLostError: no server lived for LOST_SECONDS, or live servers lost the work MAX_TRIES times.
            Exception: any other error of ``work``.
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
                    # The server may have died this moment, which does not count as a try.
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
        """Wait for a free place, and yield the least busy server."""
        async with self._changed:
            places = self._settings.eval_concurrency
            while not (free := [s for s in self.servers.values() if s.is_usable and len(s.jobs) < places]):
                if self._watch.done():
                    await self._watch
                if not self.alive and time.monotonic() - self._alive_at > LOST_SECONDS:
                    raise DependencyLostError(f"no server answers for {LOST_SECONDS:g} s: {self._problems()}")
                await self._changed.wait()
        try:
            yield min(free, key=lambda server: len(server.jobs))
        finally:
            async with self._changed:
                self._changed.notify()

    async def _add(self, url: str) -> None:
        settings, token = self._settings, self._settings.token
        rollouts = RolloutClient(
            parse_url(url),
            token,
            vocab_size=self._vocab_size,
            max_concurrency=settings.eval_concurrency,
            deadline_seconds=PROMPT_SECONDS,
            seed_each_completion=settings.engine_deterministic,
            lora_path=self._adapter,
        )
        http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=httpx.Timeout(PROMPT_SECONDS, connect=PROBE_SECONDS),
            limits=httpx.Limits(),  # The places of a server bound its connections.
            trust_env=False,
        )
        self.servers[url] = Server(
            url,
            await self._stack.enter_async_context(rollouts),
            await self._stack.enter_async_context(http),
            self._adapter,
        )

    async def _watch_servers(self) -> None:
        """Probe every server every WATCH_SECONDS, and discover new ones, until cancelled."""
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
            # Wakes the waiting work, which then raises the error of this task.
            async with self._changed:
                self._changed.notify_all()

    async def _find_more(self, discover: Discover) -> None:
        try:
            found = {parse_url(url).url for url in await discover()}
        except DependencyLostError:
            return  # the known servers stay; the loss of all of them is noticed elsewhere
        for url in sorted(found - set(self.servers)):
            await self._add(url)
        for url, server in list(self.servers.items()):
            if url not in found and url not in self._given and not server.is_alive:
                del self.servers[url]

    async def _probe(self, server: Server) -> None:
        try:
            response = await server.http.get("/health", timeout=PROBE_SECONDS)
        except httpx.HTTPError as error:
            server.refusals += isinstance(error, httpx.ConnectError)
            server.problem = describe(error)
        else:
            server.refusals = 0
            if response.status_code == httpx.codes.OK:
                server.answered = time.monotonic()
                server.is_alive = True
                return
            server.problem = f"/health answers {response.status_code} {response.text[:100]}".strip()
        if server.refusals >= REFUSALS or time.monotonic() - server.answered > SILENT_SECONDS:
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
        # A training run's workers serve the trained adapters beside the model.
        server.adapter = self._adapter = await server.rollouts.find_adapter()

    def _problems(self) -> str:
        problems = [f"{server.url}: {server.problem}" for server in self.servers.values()]
        return "; ".join(problems) or "discovery found none"
