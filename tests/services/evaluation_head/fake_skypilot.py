"""A fake of SkyPilot's SDK with the functions and errors that discovery uses."""

from __future__ import annotations

import enum
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.waiting import IDLE_SECONDS


class ClusterStatus(enum.Enum):
    UP = "UP"
    INIT = "INIT"
    STOPPED = "STOPPED"


class ReplicaStatus(enum.Enum):
    READY = "READY"
    STARTING = "STARTING"


class ClusterNotUpError(Exception):
    pass


class ApiServerConnectionError(RuntimeError):
    pass


class ApiServerAuthenticationError(RuntimeError):
    pass


class APIVersionMismatchError(RuntimeError):
    pass


class FakeSkyPilot:
    """A fake SDK: clusters by name as (status, {port: address} or an error), and replicas by service."""

    def __init__(self) -> None:
        self.clusters: dict[str, tuple[ClusterStatus, dict[int, str] | Exception]] = {}
        self.services: dict[str, list[dict[str, Any]]] = {}
        self.service_endpoints: dict[str, str] = {}
        self.status_error: Exception | None = None
        self.serve_error: Exception | None = None
        self.seconds = 0.0
        self.answers = threading.Event()
        self.answers.set()
        self.passes = 0
        self.serve = SimpleNamespace(status=self._serve_status)
        self.exceptions = SimpleNamespace(
            ClusterNotUpError=ClusterNotUpError,
            ApiServerConnectionError=ApiServerConnectionError,
            ApiServerAuthenticationError=ApiServerAuthenticationError,
            APIVersionMismatchError=APIVersionMismatchError,
        )
        self._requests: dict[str, Any] = {}

    def status(self, cluster_names: Any = None, all_users: bool = False) -> str:
        assert all_users
        self.passes += 1
        records = [SimpleNamespace(name=name, status=status) for name, (status, _) in self.clusters.items()]
        return self._request(self.status_error or records)

    def endpoints(self, cluster: str, port: int | None = None) -> str:
        status, ports = self.clusters[cluster]
        if status is not ClusterStatus.UP:
            return self._request(ClusterNotUpError(f"{cluster} is {status.value}"))
        if isinstance(ports, Exception):
            return self._request(ports)
        return self._request({p: address for p, address in ports.items() if port in (None, p)})

    def _serve_status(self, service_names: Any) -> str:
        records = [
            {"name": name, "replica_info": replicas, "endpoint": self.service_endpoints.get(name)}
            for name, replicas in self.services.items()
        ]
        return self._request(self.serve_error or records)

    def _request(self, result: Any) -> str:
        request_id = str(len(self._requests))
        self._requests[request_id] = result
        return request_id

    def get(self, request_id: str) -> Any:
        time.sleep(self.seconds)
        self.answers.wait(IDLE_SECONDS)
        result = self._requests[request_id]
        if isinstance(result, Exception):
            raise result
        return result
