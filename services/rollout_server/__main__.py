"""Run a rollout node: ``python -m services.rollout_server``. It starts the engines and, on node 0, the router.

Each is restarted when it ends, a bounded number of times. The launcher exits with 33 when a child ends more often or
when the shared volume or the router stays away, and with 78 when a child never came up, because restarting the node
would hardly change that. It always stops its child processes, however the launcher itself ends.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from services.core import endpoints, logs, machine, models
from services.core.child import LAUNCHER_VARIABLE
from services.core.endpoints import Endpoint, Task
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError, exit_code_of
from services.core.processes import kill_stale_processes
from services.core.supervisor import ChildRefusedError, SupervisedProcess
from services.core.tasks import in_background, run_until_first_ends
from services.engines.engine import Engine, choose_engine
from services.engines.placement import EnginePlace, place_engines, size_facts
from services.engines.router import RouterAdmin, proxy_command, router_command
from services.engines.settings import EngineKind, RolloutSettings
from services.engines.sglang_command import EngineKernels, check_installed
from services.http import provenance
from services.http.client import HttpClient
from services.rollout_server.registration import WorkerRegistration
from services.rollout_server.watch import watch_engine

log = logs.get_logger(__name__)

ROUTER_START_SECONDS = 60.0
"""Longest time until a router or proxy that was started answers; a busy machine takes several seconds."""


@dataclass(frozen=True)
class Addresses:
    """The addresses on which this node's programs listen, and the public addresses of router and workers."""

    engines: list[Endpoint]
    """The addresses on which this node's engines listen."""
    router: Endpoint
    router_metrics: Endpoint
    auth_proxy: Endpoint | None
    """In front of the router; None without a token."""
    public_router: Endpoint
    """The address at which every node reaches the router, through the proxy if there is one."""
    own_workers: list[Endpoint]
    """The addresses at which every node reaches this node's engines."""
    first_workers: list[Endpoint]
    """The addresses at which every node reaches the first engine of each node, by rank."""


def choose_addresses(
    *,
    has_token: bool,
    n_engines: int = 1,
    host: str | None = None,
    port: int | None = None,
    engine_port: int | None = None,
) -> Addresses:
    """Return this node's addresses; ``host`` and the ports are those of the command line, None where it has none.

    Further engines have ports as far from the first one's as those of ``ENGINE_PORTS``.

    With a token the router listens to its own node only, because it does not ask for the token on all its routes and
    never on its metrics' port.
    """

    def public(default_port: int, chosen_port: int | None = None) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint(host or default.host, chosen_port or default.port)

    def private(default_port: int) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint("127.0.0.1", default.port) if default.host in endpoints.EVERYWHERE else default

    own_rank = endpoints.node_rank()
    front = public(endpoints.ROUTER_PORT, port)
    usual_ports = endpoints.ENGINE_PORTS[:n_engines]
    engines = [public(usual, engine_port and engine_port + usual - endpoints.ENGINE_PORT) for usual in usual_ports]
    own_workers = [_reached(engine, usual) for engine, usual in zip(engines, usual_ports, strict=True)]

    def first_worker(rank: int) -> Endpoint:
        usual = endpoints.endpoint(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT, rank)
        return own_workers[0] if rank == own_rank else Endpoint(usual.host, engine_port or usual.port)

    usual_router = endpoints.endpoint(Task.ROLLOUT_SERVER)
    return Addresses(
        engines=engines,
        router=private(endpoints.ROUTER_INNER_PORT) if has_token else front,
        router_metrics=(private if has_token else public)(endpoints.ROUTER_METRICS_PORT),
        auth_proxy=front if has_token else None,
        public_router=endpoints.reached_at(front, usual_router)
        if own_rank == 0
        else Endpoint(usual_router.host, port or usual_router.port),
        own_workers=own_workers,
        first_workers=[first_worker(rank) for rank in range(endpoints.num_nodes())],
    )


def _reached(listen: Endpoint, usual_port: int) -> Endpoint:
    """Return the address at which every node reaches a program of this node."""
    return endpoints.reached_at(listen, endpoints.endpoint(Task.ROLLOUT_SERVER, usual_port, endpoints.node_rank()))


async def run_node(
    settings: RolloutSettings, engine_class: type[Engine], places: Sequence[EnginePlace], addresses: Addresses
) -> None:
    """Run the engines, their registrations and, on node 0, the router until SIGTERM or SIGINT.

    Raises:
        DependencyLostError: a child keeps ending, or router or shared volume are gone for good.
        ConfigurationError: an engine cannot run with these settings, or an engine or the router never came up.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    rank = endpoints.node_rank()
    if rank == 0:
        check_installed("sglang_router", "rollout")
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(RouterAdmin(addresses.public_router, settings.token))
        registrations, processes, parts = [], [], []
        for place, listen, reached_at in zip(places, addresses.engines, addresses.own_workers, strict=True):
            worker = _client(settings, engine_class, place, reached_at)
            own = {"engine": engine_class.kind.value, "nccl": worker.nccl, "listen": listen.url}
            log.info("engine placed", **vars(place), **own)
            await stack.enter_async_context(worker)
            process = SupervisedProcess(
                engine_class.command(settings, listen, place),
                worker.is_healthy,
                max_restarts=settings.rollout_max_restarts,
                start_seconds=settings.engine_start_seconds,
            )
            registration = WorkerRegistration(settings, worker, router, process)
            process.before_restart = registration.withdraw
            registrations.append(registration)
            processes.append(process)
            watch = watch_engine(settings, worker, process, registration.is_updating)
            parts += [process.run(), registration.run(), watch]

        async def stop_on_signal() -> None:
            await stopped.wait()
            log.info("stopping")
            await _withdraw(registrations)

        await _withdraw(registrations)
        kernels = _loaded_kernels(settings, engine_class, places)
        parts += [stop_on_signal(), _keep_kernels(kernels, processes)]
        if rank == 0:
            parts.append(_run_router(settings, addresses, router))
        await run_until_first_ends(*parts)


def _client(settings: RolloutSettings, engine_class: type[Engine], place: EnginePlace, reached_at: Endpoint) -> Engine:
    """Return the client of an engine of this node."""
    # A worker may take as long to load a version as to load its first weights.
    worker = engine_class(reached_at.url, settings.token, timeout=settings.engine_start_seconds)
    worker.gpus = place.devices if len(place.devices) == place.tensor_parallel else ()
    worker.nccl = machine.installed_nccl(engine_class.python(settings)) if place.devices else None
    return worker


def _loaded_kernels(
    settings: RolloutSettings, engine_class: type[Engine], places: Sequence[EnginePlace]
) -> EngineKernels | None:
    """Return the kernels that this node's engines share, after loading them; None for engines that compile none."""
    compiles = engine_class.kind is EngineKind.SGLANG and any(place.devices for place in places)
    kernels = EngineKernels.of(settings) if compiles else None
    if kernels is not None:
        kernels.load()
    return kernels


async def _keep_kernels(kernels: EngineKernels | None, processes: Sequence[SupervisedProcess]) -> None:
    """Keep what the engines have compiled once all of them answer; never return."""
    for process in processes:
        await process.wait_until_healthy(after=0)
    if kernels is not None:
        await in_background(kernels.keep)
    await asyncio.Event().wait()


async def _withdraw(registrations: Sequence[WorkerRegistration]) -> None:
    await asyncio.gather(*(registration.withdraw_if_possible() for registration in registrations))


async def _run_router(settings: RolloutSettings, addresses: Addresses, public: RouterAdmin) -> None:
    """Start the router, and the proxy in front of it, when the first worker of any node answers; keep them running.

    Both are checked through ``public``, as clients reach them.
    """
    urls = sorted({worker.url for worker in (*addresses.own_workers, *addresses.first_workers)})
    log.info("the router starts once a rollout worker answers", workers=" ".join(urls))
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(HttpClient(url, token=settings.token, service="worker")) for url in urls
        ]
        # If none ever answers, this node's engine ends the wait, because its supervisor gives up in the end.
        await run_until_first_ends(*(worker.wait_healthy(math.inf) for worker in workers))
    children = [router_command(settings, addresses.router, addresses.router_metrics)]
    if addresses.auth_proxy is not None:
        children.append(proxy_command(addresses.auth_proxy, addresses.router, endpoints.num_nodes()))
    most, seconds = settings.rollout_max_restarts, ROUTER_START_SECONDS
    supervise = partial(SupervisedProcess, is_healthy=public.is_healthy, max_restarts=most, start_seconds=seconds)
    await run_until_first_ends(*(supervise(command).run() for command in children))


def main() -> None:
    """Read command line and environment, and run the node."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout_server")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="the router's port, default 30000")
    parser.add_argument("--engine-port", type=int, help="the first engine's port, default 30001; the next ones add 10")
    arguments = parser.parse_args()
    settings = RolloutSettings.load()
    logs.configure(Task.ROLLOUT_SERVER.value, settings.log_level)
    if settings.colocate and LAUNCHER_VARIABLE not in os.environ:
        raise ConfigurationError(
            "COLOCATE is set, but this is a rollout-server of its own, and engines are looked for on the trainer's "
            "nodes; take jobgroups/colocated.yaml, or unset COLOCATE"
        )
    kill_stale_processes()
    endpoints.ask_directly()
    provenance.write_record(settings, Task.ROLLOUT_SERVER)
    promised = machine.promised_gpus()
    n_gpus = len(machine.visible_gpus()) if promised is None else promised
    engine_class = choose_engine(settings, n_gpus)
    engine_class.check_installed(settings, n_gpus)
    models.download_model(settings.model_name)
    places = place_engines(engine_class.split(settings, n_gpus, lambda: size_facts(settings)), n_gpus)
    addresses = choose_addresses(has_token=settings.token is not None, n_engines=len(places), **vars(arguments))
    try:
        asyncio.run(run_node(settings, engine_class, places, addresses))
    except ChildRefusedError as error:
        # Not as the log's last `error: ` line, which everybody shows: the child's own says why.
        log.error(str(error))
        sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
