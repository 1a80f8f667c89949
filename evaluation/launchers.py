"""Launchers of an evaluation's servers: on this machine, by Slurm or Ray, or none where servers run already.

With SkyPilot (``skypilot.py``) the whole evaluation runs elsewhere, together with its servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from evaluation import clusters, node, skypilot
from evaluation.clusters import Watch
from evaluation.plan import Plan
from evaluation.pool import Discover
from evaluation.server import parse_url
from evaluation.settings import Backend, SchedulerName
from local_runner import nodes, processes
from local_runner.nodes import Addresses, Run
from local_runner.spec import JobGroup, TaskSpec
from local_runner.supervisor import State, Supervisor
from services.clients.gateway import GatewayClient
from services.core import endpoints, machine
from services.core.endpoints import Endpoint, Task
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError
from services.core.settings import Settings
from services.core.tasks import in_background, run_until_first_ends
from services.engines.router import RouterAdmin

START_SECONDS = 60.0
"""The wait for the first of servers that run already."""
JOB_GROUP_START_SECONDS = 3600.0
"""The same wait in a job group, where images are pulled and models loaded at the same time."""
QUEUE_SECONDS = 86_400.0
"""The same wait for a job in Slurm's queue, and for room in Ray's cluster."""
SECRETS = ("HF_TOKEN", "JOBGROUP_TOKEN")
"""Variables that reach nodes elsewhere, and no log."""
LOCAL_START_SECONDS = 1800.0
"""Enough for a model to be downloaded and loaded."""
POLL_SECONDS = 0.2
MAX_RESTARTS = 3
LOG_LINES = 5

Say = Callable[[str], None]


def secrets() -> dict[str, str]:
    """Return the secrets of this process's environment, which servers elsewhere need, too."""
    return {name: os.environ[name] for name in SECRETS if os.environ.get(name)}


async def _watch_both(first: Watch, second: Watch) -> None:
    await run_until_first_ends(first(), second())


async def wait_forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


@dataclass(frozen=True)
class Servers:
    """The addresses of an evaluation's servers."""

    urls: Sequence[str]
    reward: Endpoint
    discover: Discover | None = None
    start_seconds: float = START_SECONDS
    """The wait for the first of them."""
    watch: Watch = wait_forever
    """Raises an error once servers that were started here have failed for good."""


@asynccontextmanager
async def servers_for(plan: Plan, model: str, output: Path, say: Say) -> AsyncIterator[Servers]:
    """Yield the servers of a plan: started on this machine, or running already; end the started ones on exit.

    Servers that run already are the given and the discovered ones, else the router of this job group. The
    reward-server is the given one, else that of this job group; outside a job group one is started here.

    Raises:
        ConfigurationError: no server is given outside a job group, or a started server refuses its configuration; the
            message has the end of its log.
        DependencyLostError: a started server failed for good, or was not ready in time.
    """
    match plan.scheduler:
        case SchedulerName.LOCAL:
            started = _started(plan, model, output, say)
        case SchedulerName.SLURM | SchedulerName.RAY:
            started = _on_cluster(plan, model, output, say)
        case _:
            started = _running(plan, output, say)
    async with started as servers:
        yield servers


@asynccontextmanager
async def _running(plan: Plan, output: Path, say: Say) -> AsyncIterator[Servers]:
    """Yield servers that run already, with a reward-server."""
    options = plan.servers
    urls = [parse_url(url).url for url in options.urls] + [parse_url(url, is_api=True).url for url in options.endpoints]
    discover: Discover | None = None
    if options.discover is not None:
        skypilot.import_sky()
        discover = partial(in_background, partial(skypilot.find, options.discover))
    if not urls and discover is None:
        if not in_job_group():
            raise ConfigurationError("--scheduler endpoints needs --url, --endpoint or --discover outside a job group")
        urls = [endpoints.endpoint(Task.ROLLOUT_SERVER).url]
    start_seconds = JOB_GROUP_START_SECONDS if in_job_group() else START_SECONDS
    if in_job_group() and options.reward_url is None:
        yield Servers(urls, endpoints.endpoint(Task.REWARD_SERVER), discover, start_seconds)
    else:
        async with _started(plan, None, output, say) as servers:
            yield Servers(urls, servers.reward, discover, start_seconds, servers.watch)


@asynccontextmanager
async def _on_cluster(plan: Plan, model: str, output: Path, say: Say) -> AsyncIterator[Servers]:
    """Start rollout nodes by Slurm or Ray, and a reward-server here."""
    allocation = plan.servers.allocation
    if plan.scheduler is SchedulerName.SLURM:
        directory = output / "servers" / f"slurm-{uuid.uuid4().hex[:8]}"
        directory.mkdir(parents=True)
        starting = clusters.on_slurm(slurm_script(plan, model, directory), directory)
        started = f"submitted {allocation} to Slurm; log and addresses in {directory}"
    else:
        starting = clusters.on_ray(allocation, _node_variables(plan, model) | secrets())
        started = f"asked Ray for {allocation}; each node works once Ray has started it"
    async with _started(plan, None, output, say) as here, starting as (discover, watch):
        say(started)

        async def found() -> Sequence[str]:
            urls = await discover()
            endpoints.ask_directly(*(urlsplit(url).hostname or "" for url in urls))
            return urls

        yield Servers([], here.reward, found, QUEUE_SECONDS, partial(_watch_both, here.watch, watch))


def slurm_script(plan: Plan, model: str, directory: Path) -> str:
    """Return the batch file of the rollout nodes of a plan; ``directory`` gets their log and addresses."""
    return clusters.slurm_script("evaluate", plan.servers.allocation, _node_variables(plan, model), directory)


def _node_variables(plan: Plan, model: str) -> dict[str, str]:
    return {**plan.variables, "MODEL_NAME": model, **plan.servers.allocation.engine_variables(_user_variables(plan))}


def _user_variables(plan: Plan) -> dict[str, str]:
    """Return the user's variables: those of the command line, and those of this process's environment."""
    return {**os.environ, **plan.variables}


@asynccontextmanager
async def _started(plan: Plan, model: str | None, output: Path, say: Say) -> AsyncIterator[Servers]:
    """Start a reward-server, unless one is given, and with a ``model`` the plan's rollout nodes behind one router."""
    group = _group(model, plan)
    reward_url = plan.servers.reward_url
    if reward_url is not None and not group.tasks:
        yield Servers([], parse_url(reward_url))
        return
    async with _supervised(group, output, say) as (addresses, watch):
        reward = parse_url(reward_url or addresses.find(Task.REWARD_SERVER, 0, endpoints.REWARD_PORT))
        urls = []
        if model is not None and plan.servers.backend is Backend.VLLM:
            ranks = range(plan.servers.allocation.data)
            nodes_of = (addresses.find(Task.ROLLOUT_SERVER, rank, endpoints.ENGINE_PORT) for rank in ranks)
            urls = [f"http://{address}/v1" for address in nodes_of]
        elif model is not None:
            router = parse_url(addresses.find(Task.ROLLOUT_SERVER, 0, endpoints.ROUTER_PORT))
            await run_until_first_ends(_wait_ready(router), watch())
            urls = [router.url]
        yield Servers(urls, reward, start_seconds=LOCAL_START_SECONDS, watch=watch)


@asynccontextmanager
async def gateway_for(
    plan: Plan, model: str, engine: str, output: Path, say: Say
) -> AsyncIterator[tuple[GatewayClient, Watch]]:
    """Start a gateway in front of the ``engine`` at a URL; yield its client once it is healthy, and its watch.

    Raises:
        ConfigurationError: it refuses its configuration; the message has the end of its log.
        DependencyLostError: it failed for good, or was not ready in time.
    """
    # Its database needs a disk of this machine, and is of no use later on.
    with tempfile.TemporaryDirectory(prefix="gateway-") as directory:
        task = _task(plan, Task.GATEWAY, "services.gateway", MODEL_NAME=model, GATEWAY_DIR=directory)
        router = {f"{Task.ROLLOUT_SERVER}-0:{endpoints.ROUTER_PORT}": engine.removeprefix("http://")}
        async with _supervised(JobGroup("evaluation", (task,)), output, say, router) as (addresses, watch):
            address = parse_url(addresses.find(Task.GATEWAY, 0, endpoints.GATEWAY_PORT))
            async with GatewayClient(address, plan.settings.token) as gateway:
                await run_until_first_ends(gateway.wait_healthy(LOCAL_START_SECONDS), watch())
                yield gateway, watch


@asynccontextmanager
async def _supervised(
    group: JobGroup, output: Path, say: Say, others: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Addresses, Watch]]:
    """Run a job group on this machine within the context; yield its addresses and what raises an error at its end.

    ``others`` are the addresses of nodes that do not belong to the group, as JOBGROUP_ENDPOINTS has them.
    """
    with nodes.allocate(group) as addresses:
        # For agents that ask the gateway with clients of their own.
        endpoints.ask_directly(*chain(*addresses.hosts.values()))
        run = Run(
            group=group,
            run_id="servers",
            shared_dir=output / "servers",
            addresses=replace(addresses, endpoints={**addresses.endpoints, **(others or {})}),
            gpus=machine.visible_gpus(),
            mark=f"evaluation-{uuid.uuid4().hex}",
        )
        counts = " and ".join(f"{task.num_nodes} {task.name}" for task in group.tasks)
        say(f"starting {counts}; logs in {run.run_dir / 'logs'}")

        def report(task: TaskSpec, rank: int | None, state: State, why: str) -> None:
            if state in (State.FAILED, State.RESTARTING):
                say(f"{task.name}{'' if rank is None else f'-{rank}'} {state.value}: {why}")

        supervisor = Supervisor(run, report)

        async def watch() -> None:
            outcome = await asyncio.shield(job)
            message = f"the servers ended: {outcome.reason}\n{_ends_of_logs(run)}"
            is_configuration = outcome.exit_code == EXIT_CONFIGURATION
            raise ConfigurationError(message) if is_configuration else DependencyLostError(message)

        with processes.guard(run.mark):
            job = asyncio.create_task(supervisor.run())
            try:
                yield addresses, watch
            finally:
                supervisor.stop(signal.SIGTERM)
                await asyncio.gather(job, return_exceptions=True)


def in_job_group() -> bool:
    """Return whether this process is a node of a job group, on a cluster or under the local runner."""
    return "SKYPILOT_JOBGROUP_NAME" in os.environ or endpoints.ENDPOINTS_VARIABLE in os.environ


async def _wait_ready(router: Endpoint) -> None:
    """Wait until the router has a worker.

    Raises:
        DependencyLostError: it has none within LOCAL_START_SECONDS.
    """
    async with RouterAdmin(router, Settings.load().token) as control:
        try:
            async with asyncio.timeout(LOCAL_START_SECONDS):
                # The router has no route that waits for a worker.
                while not (  # noqa: ASYNC110
                    await control.is_healthy() and any(worker.is_healthy for worker in await control.workers())
                ):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            raise DependencyLostError(f"no rollout node is ready after {LOCAL_START_SECONDS:g} s") from error


def _group(model: str | None, plan: Plan) -> JobGroup:
    """Return the tasks of jobgroup.yaml that every evaluation needs."""
    tasks = [] if plan.servers.reward_url else [_task(plan, Task.REWARD_SERVER, "services.reward_server")]
    if model is not None:
        allocation = plan.servers.allocation
        share = allocation.gpus if allocation.gpus > 1 else len(machine.visible_gpus()) // allocation.data
        is_vllm = plan.servers.backend is Backend.VLLM
        module = f"{node.MODULE} {node.VLLM}" if is_vllm else "services.rollout_server"
        user = _user_variables(plan)
        sizes = allocation.vllm_variables(user) if is_vllm else allocation.engine_variables(user)
        variables = {"MODEL_NAME": model, **sizes}
        tasks.append(_task(plan, Task.ROLLOUT_SERVER, module, num_nodes=allocation.data, gpus=share, **variables))
    return JobGroup("evaluation", tuple(tasks))


def _task(plan: Plan, name: Task, module: str, num_nodes: int = 1, gpus: int = 0, **variables: str) -> TaskSpec:
    """Return a task, which is primary, so that its end is noticed."""
    return TaskSpec(
        name=name.value,
        run=f"exec python -m {module}",
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        environment={**plan.variables, **variables},
        max_restarts_on_errors=MAX_RESTARTS,
        recover_on_exit_codes=frozenset({EXIT_RECOVERABLE}),
        is_primary=True,
    )


def _ends_of_logs(run: Run) -> str:
    logs = sorted(path for task in run.group.tasks for path in (run.run_dir / "logs").glob(f"{task.name}-*.log"))
    ends = {log.name: log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:] for log in logs}
    return "\n".join(f"{name}: {line}" for name, lines in ends.items() for line in lines)
