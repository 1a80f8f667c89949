"""Ray: rollout nodes as actors, each a process on a machine of the Ray cluster, or of a local one."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from evaluation import node
from evaluation.allocation import Allocation
from services.core.errors import ConfigurationError, DependencyLostError

POLL_SECONDS = 5.0
STOP_SECONDS = 30.0

Watch = Callable[[], Awaitable[None]]


class Node:
    """A rollout node on the machine on which Ray puts the actor."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start the node's process with further variables."""
        import ray

        placed, self._url = node.placed(ray.util.get_node_ip_address())
        self._process = subprocess.Popen(node.COMMAND, env={**os.environ, **variables, **placed})

    def url(self) -> str:
        """Return the router's URL."""
        return self._url

    def exit_code(self) -> int | None:
        """Return the process's exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process and what it started."""
        self._process.terminate()
        self._process.wait(STOP_SECONDS)


@asynccontextmanager
async def running(allocation: Allocation, variables: Mapping[str, str]) -> AsyncIterator[tuple[list[str], Watch]]:
    """Start the nodes; yield their URLs and what raises an error once all have ended. End them on exit.

    A cluster is found as ``ray.init`` finds it, by RAY_ADDRESS or on this machine; without one Ray starts its own.

    Raises:
        ConfigurationError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "--scheduler ray: Ray is not installed here; install it with pip install ray"
        ) from error
    await asyncio.to_thread(ray.init, log_to_driver=False, configure_logging=False)
    on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    actor: Any = ray.remote(num_cpus=1, num_gpus=allocation.gpus if on_gpus else 0)(Node)
    nodes = [actor.remote(dict(variables)) for _ in range(allocation.data)]

    async def watch() -> None:
        while None in (codes := await asyncio.gather(*(one.exit_code.remote() for one in nodes))):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        raise DependencyLostError(f"all nodes on Ray have ended, with {codes}; see Ray's logs of the workers")

    try:
        yield list(await asyncio.gather(*(one.url.remote() for one in nodes))), watch
    finally:
        await asyncio.gather(*(one.stop.remote() for one in nodes), return_exceptions=True)
        await asyncio.to_thread(ray.shutdown)
