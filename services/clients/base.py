"""The base of the clients of data-server, reward-server and replay-buffer."""

from __future__ import annotations

from typing import ClassVar

from services.core import endpoints
from services.http.client import HttpClient
from services.protocol.base import ComponentRecord


class ServiceClient(HttpClient):
    """A client of one service of the job group."""

    task: ClassVar[endpoints.Task]

    def __init__(
        self,
        endpoint: endpoints.Endpoint | str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        deadline: float = 90.0,
    ) -> None:
        """Make a client of the service at ``endpoint``, an address or a URL, by default the job group's.

        ``timeout`` is for one attempt and ``deadline`` for a call with all its attempts, both in seconds.
        """
        url = endpoint if isinstance(endpoint, str) else (endpoint or endpoints.endpoint(self.task)).url
        super().__init__(url, token=token, timeout=timeout, service=self.task.value, deadline=deadline)

    async def settings(self) -> ComponentRecord:
        """Return the service's record of its settings, commit and packages."""
        return await self.call("GET", "/settings", ComponentRecord)
