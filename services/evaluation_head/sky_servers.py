"""The servers that SkyPilot runs, by their names. The functions raise SkyPilot's errors, which may be of any type.

Evaluation uses it, too, in an environment that has SkyPilot and few other packages, so it imports as little as it can.
"""

from __future__ import annotations

from typing import Any

from services.protocol.evaluation import DiscoveredServer

NO_SERVICES = "no live services"
"""A part of SkyPilot's error where there are no services."""


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
