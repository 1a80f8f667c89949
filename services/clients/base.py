"""The base of the clients of one service."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, Self

from services.core import endpoints
from services.http.client import HttpClient
from services.protocol import (
    ComponentRecord,
)


class ServiceClient:
    """What the three clients share: one HttpClient and its life."""

    service: ClassVar[endpoints.Task]
    port: ClassVar[int]

    def __init__(
        self,
        endpoint: endpoints.Endpoint | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        deadline: float = 90.0,
    ) -> None:
        """Makes a client of the service at ``endpoint``, by default the job group's.

        ``timeout`` is for one attempt and ``deadline`` for a call with all its attempts, both in seconds.
        """
        address = endpoint or endpoints.endpoint(self.service, self.port)
        self.http = HttpClient(address.url, token=token, timeout=timeout, service=self.service.value, deadline=deadline)

    async def __aenter__(self) -> Self:
        await self.http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.__aexit__(kind, error, trace)

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Returns when the service is healthy; DependencyLostError when it is not within ``deadline_seconds``."""
        await self.http.wait_healthy(deadline_seconds)

    async def settings(self) -> ComponentRecord:
        """Ask what the service runs with."""
        return await self.http.get_json("/settings", ComponentRecord)
