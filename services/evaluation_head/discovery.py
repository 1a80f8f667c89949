"""Discovery of environment servers: given addresses, SkyPilot's clusters, and the replicas of SkyServe's services.

SkyPilot's SDK reads SKYPILOT_API_SERVER_ENDPOINT and SKYPILOT_SERVICE_ACCOUNT_TOKEN from the environment by itself. It
raises errors of any type: the API server's, those of its HTTP library, and ImportError where it is not installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import DiscoveredServer, DiscoveryReply

log = get_logger(__name__)

INTERVAL_SECONDS = 30.0
"""Time between two searches for servers: a new one takes minutes to start, SkyPilot's API server seconds to answer."""
TIMEOUT_SECONDS = 60.0
"""Limit of one source's answer."""
NO_SERVICES = "no live services"
"""A part of SkyPilot's error where there are no services."""

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


def find_clusters(prefixes: tuple[str, ...], port: int) -> list[DiscoveredServer]:
    """Return the clusters whose names begin with one of ``prefixes``: a server each, on ``port``, which they open.

    Raises:
        Exception: any error of SkyPilot.
    """
    import sky

    clusters = [cluster for cluster in sky.get(sky.status(all_users=True)) if cluster.name.startswith(prefixes)]
    # All requests are sent before the first reply is awaited, because each takes the API server a second or more.
    requests = {c.name: sky.endpoints(c.name, port=port) for c in clusters if c.status.value == "UP"}
    urls = {name: _endpoint(request, port) for name, request in requests.items()}
    return [
        DiscoveredServer(name=c.name, source="cluster", status=c.status.value, url=urls.get(c.name)) for c in clusters
    ]


def find_replicas(prefixes: tuple[str, ...]) -> list[DiscoveredServer]:
    """Return the replicas of SkyServe services whose names begin with one of ``prefixes``.

    Each replica is a server, because the service's own address would send an episode's steps to any of them. Episodes
    begin through that address, because SkyServe's autoscaler counts its requests.

    Raises:
        Exception: any error of SkyPilot.
    """
    import sky

    try:
        services = sky.get(sky.serve.status(None))
    except Exception as error:
        if isinstance(error, sky.exceptions.ClusterNotUpError) or NO_SERVICES in str(error).lower():
            return []  # without a controller there are no services
        raise
    return [
        DiscoveredServer(
            name=f"{service['name']}/{replica['replica_id']}",
            source="service",
            status=replica["status"].value,
            url=_url_of(replica["endpoint"]) if replica["status"].value == "READY" else None,
            entrance=_url_of(service.get("endpoint")),
        )
        for service in services
        if service["name"].startswith(prefixes)
        for replica in service.get("replica_info", [])
    ]


def _endpoint(request: Any, port: int) -> str | None:
    import sky

    errors = sky.exceptions
    try:
        endpoints = sky.get(request)
    except (errors.ApiServerConnectionError, errors.ApiServerAuthenticationError, errors.APIVersionMismatchError):
        raise
    # ClusterNotUpError, ValueError, RuntimeError: the cluster went down meanwhile, or does not open the port (yet).
    except Exception:  # noqa: BLE001
        return None
    return _url_of(endpoints.get(port) or endpoints.get(str(port)))


def _url_of(address: str | None) -> str | None:
    return address and (address if "://" in address else f"http://{address}").rstrip("/")
