"""Environment servers among the clusters and SkyServe services of a SkyPilot API server.

The SDK comes in as an object, so that this file needs no SkyPilot to be read, checked or tested: what is used of it are
``status``, ``endpoints``, ``get``, ``serve.status`` and ``exceptions``. It reads SKYPILOT_API_SERVER_ENDPOINT and
SKYPILOT_SERVICE_ACCOUNT_TOKEN from the environment by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.evaluation_head.discovery import DiscoveryError
from services.protocol.evaluation import DiscoveredServer

NO_SERVICES = "no live services"


def sdk() -> Any:
    """SkyPilot's SDK.

    Raises:
        DiscoveryError: it is not installed.
    """
    try:
        import sky
    except ImportError as error:
        raise DiscoveryError("SkyPilot is not installed here: pip install 'skypilot==0.14.1'") from error
    return sky


class Clusters:
    """Clusters whose names begin with a prefix: one server each, on a port that the cluster opens."""

    name = "clusters"

    def __init__(self, prefix: str, port: int, sky: Any = None) -> None:
        self._prefix = prefix
        self._port = port
        self._sky = sky

    def find(self) -> list[DiscoveredServer]:
        """See Source."""
        sky = self._sky or sdk()
        try:
            records = sky.get(sky.status(all_users=True))
            ours = [r for r in records if str(_field(r, "name")).startswith(self._prefix)]
            # Asked for all at once, then waited for: each takes the API server a second or more.
            asked = {_field(r, "name"): self._ask(sky, r) for r in ours if _status(r) == "UP"}
            return [
                DiscoveredServer(
                    name=_field(r, "name"),
                    source="cluster",
                    status=_status(r),
                    url=self._url(sky, asked.get(_field(r, "name"))),
                )
                for r in ours
            ]
        # The SDK raises what the server raised, and whatever its HTTP library does.
        except Exception as error:
            raise DiscoveryError(_describe(sky, error)) from error

    def _ask(self, sky: Any, record: Any) -> Any:
        return sky.endpoints(_field(record, "name"), port=self._port)

    def _url(self, sky: Any, request: Any) -> str | None:
        if request is None:
            return None
        try:
            endpoints = sky.get(request)
        except _connection_errors(sky):
            raise
        # ClusterNotUpError, ValueError, RuntimeError: it went down meanwhile, or does not open the port (yet).
        except Exception:  # noqa: BLE001
            return None
        found = endpoints.get(self._port) or endpoints.get(str(self._port))
        return _as_url(found) if found else None


class Services:
    """Replicas of SkyServe services whose names begin with a prefix.

    Each replica is a server of its own: the service's one address would send the steps of an episode to any of them.
    """

    name = "services"

    def __init__(self, prefix: str, sky: Any = None) -> None:
        self._prefix = prefix
        self._sky = sky

    def find(self) -> list[DiscoveredServer]:
        """See Source."""
        sky = self._sky or sdk()
        try:
            services = sky.get(sky.serve.status(None))
        except sky.exceptions.ClusterNotUpError:
            return []  # no controller, so no services
        # As above; that there are no services is an error too, in SkyPilot's eyes.
        except Exception as error:
            if NO_SERVICES in str(error).lower() and not isinstance(error, _connection_errors(sky)):
                return []
            raise DiscoveryError(_describe(sky, error)) from error
        ours = [service for service in services if str(service["name"]).startswith(self._prefix)]
        return [server for service in ours for server in _replicas(service)]


def _replicas(service: dict[str, Any]) -> Iterable[DiscoveredServer]:
    for replica in service.get("replica_info") or []:
        status = _word(replica.get("status"))
        address = replica.get("endpoint")
        yield DiscoveredServer(
            name=f"{service['name']}/{replica.get('replica_id')}",
            source="service",
            status=status,
            url=_as_url(address) if address and status == "READY" else None,
        )


def _field(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, dict) else getattr(record, name)


def _status(record: Any) -> str:
    return _word(_field(record, "status"))


def _word(status: Any) -> str:
    return str(getattr(status, "value", status))


def _as_url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _connection_errors(sky: Any) -> tuple[type[Exception], ...]:
    names = ("ApiServerConnectionError", "ApiServerAuthenticationError", "APIVersionMismatchError")
    return tuple(getattr(sky.exceptions, name) for name in names)


def _describe(sky: Any, error: Exception) -> str:
    if isinstance(error, sky.exceptions.ApiServerAuthenticationError):
        return f"SkyPilot's API server refuses the token: {error}; set SKYPILOT_SERVICE_ACCOUNT_TOKEN"
    if isinstance(error, sky.exceptions.ApiServerConnectionError):
        return f"SkyPilot's API server cannot be reached: {error}; see SKYPILOT_API_SERVER_ENDPOINT"
    return f"{type(error).__name__}: {error}"
