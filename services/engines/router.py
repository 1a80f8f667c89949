"""The router in front of all engines: its command and its proxy's, its list of workers, and each worker's engine."""

from __future__ import annotations

import math
import shlex
import sys
from typing import Any

from pydantic import BaseModel, Field

from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import PROXY_VARIABLES, Endpoint, Task, endpoint
from services.core.errors import DependencyLostError
from services.core.processes import Command
from services.engines.engine import ENGINES, ROUTED, Engine
from services.engines.settings import EngineKind, RolloutSettings
from services.engines.sglang_command import listen_flags
from services.http.client import HttpClient, RequestRefusedError

ROUTER_SECONDS = 30.0

NODES_A_PROCESS = 16
"""Rollout nodes whose requests one process of the proxy passes on: with agents some 13 a second to each H100, and 200 a
second at most."""

ENGINE_LABEL = "engine"
"""The label with a worker's kind of engine: the router keeps a worker's labels, and lists them as metadata."""

GPUS_LABEL = "gpus"
"""The label with the names of a worker's GPUs in CUDA_VISIBLE_DEVICES, by tensor-parallel rank."""

NCCL_LABEL = "nccl"
"""The label with a worker's version of NCCL, if it has GPUs."""

ROUTER_FLAGS = (
    # Requests of one X-SMG-Routing-Key go to one worker, which has the session in its cache; those of a new key to the
    # worker with the fewest requests. Requests without a key go to any.
    *("--policy", "manual", "--assignment-mode", "min_load"),
    *("--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", "60"),
    *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "3", "--health-success-threshold", "1"),
    *("--request-timeout-secs", "1800", "--retry-max-retries", "5"),
    # The circuit breaker also counts refusals (400, 429) as failures of the worker, so it opens for a second only:
    # otherwise one client's bad requests would close the rollout tier to all.
    *("--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    # The launcher kills the router after four seconds anyway.
    *("--shutdown-grace-period-secs", "3"),
    # Generation takes minutes and clients bound what they send, so the router itself queues without a limit.
    *("--max-concurrent-requests", "-1", "--log-level", "warn"),
)
"""The router's defaults, which ROUTER_EXTRA_FLAGS can override."""


def router_command(settings: RolloutSettings, address: Endpoint, metrics: Endpoint) -> Command:
    """Return the command of the router, which starts without workers; these are registered as they come up."""
    flags = [*listen_flags(Endpoint(address.url_host, address.port)), API_KEY_FROM_TOKEN, *ROUTER_FLAGS]
    flags += ["--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port)]
    flags += shlex.split(settings.router_extra_flags)
    # The router asks only workers, which a proxy would hardly reach: then no worker would ever be registered. It takes
    # NO_PROXY=* for names only, not for addresses.
    return Command("router", sys.executable, "sglang_router.launch_router", flags, withheld=PROXY_VARIABLES)


def proxy_command(listen: Endpoint, router: Endpoint, nodes: int) -> Command:
    """Return the command of the proxy in front of the router of ``nodes`` rollout nodes."""
    processes = min(math.ceil(nodes / NODES_A_PROCESS), machine.cores())
    flags = [*listen_flags(listen), "--router", router.url, "--processes", str(processes)]
    return Command("auth-proxy", sys.executable, "services.rollout_server.auth_proxy", flags)


class Worker(BaseModel):
    """An engine as the router lists it."""

    id: str
    """The router's name for it; a worker that registers again gets a new one."""
    url: str
    is_healthy: bool
    """The router sends requests to it."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of its engine; that which has an entry of its own in the router, if it does not say."""
        return str(self.metadata.get(ENGINE_LABEL, ROUTED.kind))

    def engine(self, token: str | None, *, timeout: float) -> Engine:
        """Return the worker's engine.

        Raises:
            DependencyLostError: this version of the project does not know its kind.
        """
        if self.kind not in ENGINES:
            known = f"which is none of {', '.join(ENGINES)}; does rollout-server run another version of this project?"
            raise DependencyLostError(f"worker {self.url} is an engine {self.kind!r}, {known}")
        return ENGINES[EngineKind(self.kind)](self.url, token, timeout=timeout)


class _Workers(BaseModel):
    """The reply of the router's GET /workers."""

    workers: list[Worker]


class RouterAdmin(HttpClient):
    """The router's list of workers. An async context manager."""

    def __init__(
        self, address: Endpoint | None = None, token: str | None = None, *, deadline: float = ROUTER_SECONDS
    ) -> None:
        """Make a client of the router at an address, by default the job group's, which waits ``deadline`` seconds."""
        url = (address or endpoint(Task.ROLLOUT_SERVER)).url
        super().__init__(url, token=token, service="router", timeout=10, deadline=deadline)

    async def workers(self) -> list[Worker]:
        """Return the registered workers, sorted by URL."""
        return sorted((await self.call("GET", "/workers", _Workers)).workers, key=lambda worker: worker.url)

    async def add(self, engine: Engine) -> None:
        """Register an engine; the router asks it for its model and then routes to it."""
        # The router's own requests to a worker carry the token only when it is given here.
        key = {"api_key": self.token} if self.token else {}
        labels = {ENGINE_LABEL: engine.kind, GPUS_LABEL: ",".join(engine.gpus), NCCL_LABEL: engine.nccl}
        known = {name: value for name, value in labels.items() if value}
        await self.request("POST", "/workers", {"url": engine.url, "labels": known, **key})

    async def remove(self, url: str) -> None:
        """Take a worker out of the routing; an unregistered worker is not an error."""
        for worker in await self.workers():
            if worker.url == url:
                try:
                    await self.request("DELETE", f"/workers/{worker.id}")
                except RequestRefusedError as error:
                    if error.status != 404:
                        raise
