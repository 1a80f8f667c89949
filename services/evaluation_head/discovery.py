"""Finds environment servers by asking each source: a list of addresses, SkyPilot's clusters, SkyServe's services.

SkyPilot's SDK reads SKYPILOT_API_SERVER_ENDPOINT and SKYPILOT_SERVICE_ACCOUNT_TOKEN from the environment by itself. It
raises the API server's errors, those of its HTTP library, and ImportError where it is not installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.sky_servers import find_clusters, find_replicas
from services.protocol.evaluation import DiscoveredServer, DiscoveryReply

log = get_logger(__name__)


INTERVAL_SECONDS = 30.0
"""Time between two searches: a new server takes minutes to start, and SkyPilot's API server seconds to answer."""
TIMEOUT_SECONDS = 60.0
"""Limit of one source's answer."""

Source = Callable[[], list[DiscoveredServer]]
"""Returns the present servers; may block. Raises an error of any type if it cannot find out."""


def servers_at(urls: Sequence[str]) -> list[DiscoveredServer]:
    """Return the servers at some addresses, whether or not they are up."""
    return [DiscoveredServer(name=urlsplit(url).netloc, source="address", status="given", url=url) for url in urls]


class Discovery:
    """Asks the sources at an interval and on demand. A source that fails keeps its former servers."""

    def __init__(self, settings: HeadSettings, on_change: Callable[[list[DiscoveredServer]], None]) -> None:
        self._on_change = on_change
        self._prefixes = settings.prefixes if settings.skypilot_api_server_endpoint else ()
        self._sources: dict[str, Source] = {}
        if settings.addresses:
            self._sources["addresses"] = partial(servers_at, settings.addresses)
        if self._prefixes:
            self._sources["clusters"] = partial(find_clusters, self._prefixes, settings.game_server_port)
            self._sources["services"] = partial(find_replicas, self._prefixes)
        self._servers_of: dict[str, list[DiscoveredServer]] = {}
        self._errors: dict[str, str] = {}
        self._asked: float | None = None
        self._pending: dict[str, asyncio.Future[list[DiscoveredServer]]] = {}

    def reply(self) -> DiscoveryReply:
        """Return the servers of the last search."""
        return DiscoveryReply(
            enabled=bool(self._sources),
            prefix=", ".join(self._prefixes) or None,
            servers=self.servers,
            errors=dict(self._errors),
            age_seconds=None if self._asked is None else round(time.monotonic() - self._asked, 1),
        )

    @property
    def servers(self) -> list[DiscoveredServer]:
        """All servers. If two have the same name, the server of the first source counts."""
        servers: dict[str, DiscoveredServer] = {}
        for source in self._sources:
            for server in self._servers_of.get(source, []):
                servers.setdefault(server.name, server)
        return list(servers.values())

    async def run(self) -> None:
        """Look for servers at the interval until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def look(self) -> None:
        """Ask all sources."""
        await asyncio.gather(*(self._ask(name, source) for name, source in self._sources.items()))
        self._asked = time.monotonic()
        self._on_change(self.servers)

    async def _ask(self, name: str, source: Source) -> None:
        # One call at a time: callers that come meanwhile wait for it, and a call that hangs cannot be ended.
        pending = self._pending.get(name)
        if pending is None or pending.done():
            pending = self._pending[name] = asyncio.ensure_future(in_background(source))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._servers_of[name] = await asyncio.shield(pending)
        # SkyPilot's SDK may raise anything.
        except Exception as error:  # noqa: BLE001
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {TIMEOUT_SECONDS:g} s" if is_late else f"{type(error).__name__}: {error}"
            reason = f"{why}; needed: package skypilot, SKYPILOT_API_SERVER_ENDPOINT, SKYPILOT_SERVICE_ACCOUNT_TOKEN"
            if self._errors.get(name) != reason:
                log.warning("servers cannot be looked for", source=name, error=reason)
            self._errors[name] = reason
        else:
            self._errors.pop(name, None)
