"""Finds environment servers: at given addresses, and among SkyPilot's clusters and services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client import Counter

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.protocol.evaluation import DiscoveredServer, DiscoveryReply

log = get_logger(__name__)

FAILED = Counter("head_discovery_failed", "Looks for environment servers that failed, by source.", ["source"])


class DiscoveryError(Exception):
    """A source could not be asked; the message says why."""


class Source(Protocol):
    """Somewhere to look for servers."""

    name: str

    def find(self) -> list[DiscoveredServer]:
        """The servers there are now; may block.

        Raises:
            DiscoveryError: they are not to be had.
        """
        ...


class Addresses:
    """Servers at addresses that are given, whether or not they are up."""

    name = "addresses"

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    def find(self) -> list[DiscoveredServer]:
        """See Source."""
        return [
            DiscoveredServer(name=urlsplit(url).netloc, source="address", status="given", url=url) for url in self._urls
        ]


class Discovery:
    """Looks everywhere at an interval and on demand. A source that fails keeps what it gave before."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        prefix: str | None,
        interval: float,
        timeout: float,
        on_change: Callable[[list[DiscoveredServer]], None],
    ) -> None:
        self._sources = sources
        self._prefix = prefix
        self._interval = interval
        self._timeout = timeout
        self._on_change = on_change
        self._found: dict[str, list[DiscoveredServer]] = {}
        self._errors: dict[str, str] = {}
        self._asked: float | None = None
        self._pass: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Future[list[DiscoveredServer]]] = {}

    def reply(self) -> DiscoveryReply:
        """What was found last."""
        return DiscoveryReply(
            enabled=bool(self._sources),
            prefix=self._prefix,
            servers=self.servers,
            errors=dict(self._errors),
            age_seconds=None if self._asked is None else round(time.monotonic() - self._asked, 1),
        )

    @property
    def servers(self) -> list[DiscoveredServer]:
        """All servers found, each name once: the first source that has it wins."""
        found: dict[str, DiscoveredServer] = {}
        for source in self._sources:
            for server in self._found.get(source.name, []):
                found.setdefault(server.name, server)
        return list(found.values())

    async def run(self) -> None:
        """Looks at the interval until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Looks everywhere; those who ask while one looks already wait for the same."""
        if self._pass is None or self._pass.done():
            self._pass = asyncio.create_task(self._look())
        await asyncio.shield(self._pass)

    async def _look(self) -> None:
        await asyncio.gather(*(self._ask(source) for source in self._sources))
        self._asked = time.monotonic()
        self._on_change(self.servers)

    async def _ask(self, source: Source) -> None:
        # A call that hangs cannot be ended: no second one is made beside it.
        pending = self._pending.get(source.name)
        if pending is None or pending.done():
            pending = self._pending[source.name] = asyncio.ensure_future(in_background(source.find))
        try:
            async with asyncio.timeout(self._timeout):
                self._found[source.name] = await asyncio.shield(pending)
        except (TimeoutError, DiscoveryError) as error:
            reason = str(error) or f"no answer within {self._timeout:g} s (DISCOVERY_TIMEOUT_SECONDS)"
            FAILED.labels(source.name).inc()
            if self._errors.get(source.name) != reason:
                log.warning("servers cannot be looked for", source=source.name, error=reason)
            self._errors[source.name] = reason
        else:
            self._errors.pop(source.name, None)
