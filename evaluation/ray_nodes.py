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
from evaluation.servers import Discover
from services.core.errors import ConfigurationError, DependencyLostError, first_line

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
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its children notice that it is gone, and end.
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def running(allocation: Allocation, variables: Mapping[str, str]) -> AsyncIterator[tuple[Discover, Watch]]:
    """Start the nodes; yield what finds their URLs, and what raises an error once all have ended. End them on exit.

    Ray starts a node once the cluster has room for it. A machine that is lost is the end of its node alone.

    A cluster is found as ``ray.init`` finds it, by RAY_ADDRESS or on this machine; without one Ray starts its own.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "--scheduler ray: Ray is not installed here; install it with pip install ray"
        ) from error
    try:
        await asyncio.to_thread(ray.init, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--scheduler ray: {first_line(error)}; RAY_ADDRESS names another cluster") from error
    on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    actor: Any = ray.remote(num_cpus=1, num_gpus=allocation.gpus if on_gpus else 0)(Node)
    nodes = [actor.remote(dict(variables)) for _ in range(allocation.data)]
    urls = {one.url.remote(): one for one in nodes}

    def started() -> list[Any]:
        """Return the references of ``urls`` to which Ray has an answer: of nodes that have started, or are lost."""
        done, _ = ray.wait(list(urls), num_returns=len(urls), timeout=0)
        return list(done)

    async def discover() -> list[str]:
        found = await asyncio.gather(*started(), return_exceptions=True)
        return [url for url in found if isinstance(url, str)]

    async def watch() -> None:
        while True:
            codes = await asyncio.gather(*(one.exit_code.remote() for one in nodes), return_exceptions=True)
            if None not in codes:
                ends = ", ".join(first_line(code) if isinstance(code, BaseException) else str(code) for code in codes)
                raise DependencyLostError(f"all nodes on Ray have ended, with {ends}; see Ray's logs of the workers")
            await asyncio.sleep(POLL_SECONDS)

    try:
        yield discover, watch
    finally:
        # A node that waits for room would not answer; Ray forgets it.
        await asyncio.gather(*(urls[one].stop.remote() for one in started()), return_exceptions=True)
        await asyncio.to_thread(ray.shutdown)
