"""Runs a rollout node: ``python -m services.rollout_server``. Its engine, and on node 0 the router, are its children.

Engine and router are started again when they end, a bounded number of times; beyond that, and when the shared volume
or the router stays away, the launcher ends with exit code 33; with 78 if they never came up, which a restart would
hardly change. It leaves no process behind, whatever it ends of.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable

from services.clients.rollout_admin import RouterAdmin, WorkerAdmin
from services.core import endpoints, logs
from services.core.endpoints import Endpoint, Task
from services.core.errors import ConfigurationError, exit_code_of
from services.core.tasks import run_until_first_ends
from services.http import provenance
from services.http.client import PROBE_SECONDS
from services.rollout_server.engines import (
    Binds,
    Command,
    check_router_installed,
    choose_engine,
    door_command,
    engine_command,
    router_command,
)
from services.rollout_server.registration import WorkerKeeper
from services.rollout_server.settings import EngineKind, RolloutSettings
from services.rollout_server.supervisor import LONGEST_PAUSE_SECONDS, Supervised

log = logs.get_logger(__name__)

POLL_SECONDS = 0.2
WATCH_SECONDS = 1.0


MakeEngineCommand = Callable[[RolloutSettings, EngineKind, Endpoint], Command]


class Launcher:
    """What runs on one rollout node; ``make_engine_command`` says by which command its engine."""

    def __init__(
        self,
        settings: RolloutSettings,
        make_engine_command: MakeEngineCommand,
        *,
        host: str | None = None,
        port: int | None = None,
        engine_port: int | None = None,
    ) -> None:
        self.settings = settings
        self.rank = endpoints.node_rank()
        self.engine_port = engine_port
        binds = self.binds = Binds.of(settings, host=host, port=port, engine_port=engine_port)
        router = endpoints.endpoint(endpoints.Task.ROLLOUT_SERVER)
        if self.rank == 0:
            router = endpoints.reached_at(binds.door or binds.router, router)
        elif port is not None:
            router = Endpoint(router.host, port)
        self.router_endpoint = router
        kind = choose_engine(settings)
        if self.rank == 0:
            check_router_installed()
        log.info("engine chosen", engine=kind.value, listen=binds.engine.url, router=router.url)
        self.keeper = WorkerKeeper(settings, self._worker(self.rank).url, router, lambda: self.engine)
        self.engine = Supervised(
            make_engine_command(settings, kind, binds.engine), settings.rollout_max_restarts, self.keeper.withdraw
        )
        restarts = settings.rollout_max_restarts
        self.router = Supervised(router_command(settings, binds.router, binds.metrics), restarts)
        self.door = Supervised(door_command(binds.door, binds.router), restarts) if binds.door else None

    async def run(self) -> None:
        """Runs the node until SIGTERM or SIGINT.

        Raises:
            DependencyLostError: see the module.
            ConfigurationError: the engine cannot run with these settings, or engine or router never came up.
        """
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await self.keeper.withdraw_at_once()
        parts = [self.engine.run(), self.keeper.run()]
        if self.rank == 0:
            parts.append(self._run_router())
        await run_until_first_ends(*parts, self._stop_on(stopped))

    async def _stop_on(self, stopped: asyncio.Event) -> None:
        await stopped.wait()
        log.info("stopping")
        await self.keeper.withdraw_at_once()

    async def _run_router(self) -> None:
        """Starts the router when the first worker answers, and keeps it running."""
        await self._wait_for_a_worker()
        parts = [self.router.run(), self._watch_router()]
        if self.door is not None:
            parts.append(self.door.run())
        await run_until_first_ends(*parts)

    async def _wait_for_a_worker(self) -> None:
        # This node's own engine is given up before, with its reason.
        longest_start = self.settings.engine_start_seconds + LONGEST_PAUSE_SECONDS
        seconds = longest_start * (1 + self.settings.rollout_max_restarts)
        end = time.monotonic() + seconds
        urls = [self._worker(rank).url for rank in range(endpoints.num_nodes())]
        log.info("the router starts once a rollout worker answers", workers=" ".join(urls), seconds=seconds)
        async with contextlib.AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(WorkerAdmin(url, self.settings.token, timeout=PROBE_SECONDS))
                for url in urls
            ]
            while not any(await asyncio.gather(*(worker.is_healthy() for worker in workers))):
                if time.monotonic() > end:
                    raise ConfigurationError(
                        f"none of {len(urls)} rollout workers came up in {seconds:g} s ({', '.join(urls)}); see their "
                        f"nodes' logs"
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def _watch_router(self) -> None:
        """Kills a router that runs and does not answer."""
        answered, start = time.monotonic(), 0
        async with RouterAdmin(self.router_endpoint, self.settings.token) as router:
            while True:
                is_healthy = await router.is_healthy()
                if is_healthy:
                    self._router_was_healthy()
                if is_healthy or start != self.router.starts:
                    answered, start = time.monotonic(), self.router.starts
                elif time.monotonic() - answered > self.settings.engine_hang_seconds:
                    log.error("router hangs: killed", seconds=self.settings.engine_hang_seconds)
                    self.router.kill()
                    if self.door is not None:
                        self.door.kill()
                await asyncio.sleep(WATCH_SECONDS)

    def _router_was_healthy(self) -> None:
        """It answered, through the door where there is one."""
        self.router.was_healthy = True
        if self.door is not None:
            self.door.was_healthy = True

    def _worker(self, rank: int) -> Endpoint:
        """Where the other nodes reach the worker of node ``rank``."""
        worker = endpoints.endpoint(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT, rank)
        if rank == self.rank:
            return endpoints.reached_at(self.binds.engine, worker)
        return Endpoint(worker.host, self.engine_port or worker.port)


def main(make_engine_command: MakeEngineCommand = engine_command) -> None:
    """Reads command line and environment, and runs the node."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout_server")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="the router's port, default 30000")
    parser.add_argument("--engine-port", type=int, help="the engine's port, default 30001")
    given = parser.parse_args()
    settings = RolloutSettings.load()
    logs.configure(Task.ROLLOUT_SERVER.value, settings.log_level)
    provenance.write_record(settings, Task.ROLLOUT_SERVER)
    asyncio.run(Launcher(settings, make_engine_command, **vars(given)).run())


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
