"""Environment servers among the clusters and SkyServe services of a SkyPilot API server.

The SDK is a parameter, so that this module can be checked and tested without SkyPilot. It reads
SKYPILOT_API_SERVER_ENDPOINT and SKYPILOT_SERVICE_ACCOUNT_TOKEN from the environment by itself. Used are its functions
``status``, ``endpoints``, ``get`` and ``serve.status``, and ``exceptions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.protocol.evaluation import DiscoveredServer

NO_SERVICES = "no live services"
"""A part of the error by which SkyPilot says that there are no services."""


class DiscoveryError(Exception):
    """A source that could not be asked; the message says why."""


def find_clusters(prefix: str, port: int, sky: Any = None) -> list[DiscoveredServer]:
    """Return the clusters whose names begin with ``prefix``: one server each, on ``port``, which the cluster opens.

    Raises:
        DiscoveryError: SkyPilot cannot tell.
    """
    sky = sky or _sdk()
    with _explained(sky):
        clusters = [cluster for cluster in sky.get(sky.status(all_users=True)) if cluster.name.startswith(prefix)]
        # All are asked for before the first is waited for, because each takes the API server a second or more.
        asked = {c.name: sky.endpoints(c.name, port=port) for c in clusters if c.status.value == "UP"}
        urls = {name: _endpoint(sky, request, port) for name, request in asked.items()}
        return [
            DiscoveredServer(name=c.name, source="cluster", status=c.status.value, url=urls.get(c.name))
            for c in clusters
        ]


def find_replicas(prefix: str, sky: Any = None) -> list[DiscoveredServer]:
    """Return the replicas of SkyServe services whose names begin with ``prefix``.

    Each replica is a server, because the service's own address would send an episode's steps to any of them.

    Raises:
        DiscoveryError: SkyPilot cannot tell.
    """
    sky = sky or _sdk()
    with _explained(sky):
        try:
            services = sky.get(sky.serve.status(None))
        except sky.exceptions.ClusterNotUpError:
            return []  # no controller, so no services
        except Exception as error:
            if NO_SERVICES in str(error).lower() and not isinstance(error, _connection_errors(sky)):
                return []
            raise
        return [
            DiscoveredServer(
                name=f"{service['name']}/{replica['replica_id']}",
                source="service",
                status=replica["status"].value,
                url=_url_of(replica["endpoint"]) if replica["status"].value == "READY" else None,
            )
            for service in services
            if service["name"].startswith(prefix)
            for replica in service.get("replica_info", [])
        ]


def _sdk() -> Any:
    try:
        import sky
    except ImportError as error:
        raise DiscoveryError("SkyPilot is not installed here: pip install 'skypilot==0.14.1'") from error
    return sky


def _endpoint(sky: Any, request: Any, port: int) -> str | None:
    try:
        endpoints = sky.get(request)
    except _connection_errors(sky):
        raise
    # ClusterNotUpError, ValueError, RuntimeError: the cluster went down meanwhile, or does not open the port (yet).
    except Exception:  # noqa: BLE001
        return None
    return _url_of(endpoints.get(port) or endpoints.get(str(port)))


def _url_of(address: str | None) -> str | None:
    return address and (address if "://" in address else f"http://{address}").rstrip("/")


def _connection_errors(sky: Any) -> tuple[type[Exception], ...]:
    names = ("ApiServerConnectionError", "ApiServerAuthenticationError", "APIVersionMismatchError")
    return tuple(getattr(sky.exceptions, name) for name in names)


@contextmanager
def _explained(sky: Any) -> Iterator[None]:
    """Turn any error of the SDK into a DiscoveryError that says what to do."""
    try:
        yield
    except sky.exceptions.ApiServerAuthenticationError as error:
        raise DiscoveryError(
            f"SkyPilot's API server refuses the token: {error}; set SKYPILOT_SERVICE_ACCOUNT_TOKEN"
        ) from error
    except sky.exceptions.ApiServerConnectionError as error:
        raise DiscoveryError(
            f"SkyPilot's API server cannot be reached: {error}; see SKYPILOT_API_SERVER_ENDPOINT"
        ) from error
    # The SDK raises the server's errors, and those of its HTTP library.
    except Exception as error:
        raise DiscoveryError(f"{type(error).__name__}: {error}") from error
