"""The servers of an evaluation: started on this machine by the local runner, by Slurm or Ray, or running already.

With SkyPilot (``run.py``) the whole evaluation runs elsewhere, together with its servers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import HttpUrl, TypeAdapter, ValidationError

from evaluation import clusters
from evaluation.plan import Backend, Plan, Scheduler, in_job_group
from local_runner import nodes, processes
from local_runner.nodes import Addresses, LocalRun
from local_runner.spec import JobGroup, TaskSpec
from local_runner.supervisor import State, Supervisor
from services.core import endpoints, machine
from services.core.endpoints import Endpoint, Task
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError
from services.core.tasks import run_until_first_ends
from services.run_page.directory import Run

START_SECONDS = 60.0
"""The wait for a server that runs already."""
JOB_GROUP_START_SECONDS = 3600.0
"""The same wait in a job group, where images are pulled and models loaded at the same time."""
LOCAL_START_SECONDS = 1800.0
"""Enough for a model to be downloaded and loaded."""
SECRETS = ("HF_TOKEN", "JOBGROUP_TOKEN")
"""Variables that reach nodes elsewhere, and no log."""
MAX_RESTARTS = 3
LOG_LINES = 5

CLUSTERS = (Scheduler.SLURM, Scheduler.RAY)

Say = Callable[[str], None]
Watch = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class UrlEndpoint(Endpoint):
    """An endpoint given by its URL, which may have https or a path."""

    base_url: str = ""

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self.base_url


def parse_url(text: str, *, is_api: bool = False) -> UrlEndpoint:
    """Return the endpoint of ``host:port`` or of a URL, without the /v1 of OpenAI's routes unless it ``is_api``.

    Raises:
        ConfigurationError: ``text`` is neither.
    """
    base = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("" if is_api else "/v1")
    try:
        url = TypeAdapter(HttpUrl).validate_python(base)
    except ValidationError as error:
        raise ConfigurationError(f"{text!r} is not an address; give one such as http://127.0.0.1:30000") from error
    return UrlEndpoint(url.host or "", url.port or 80, base)


def secrets() -> dict[str, str]:
    """Return the secrets of this process's environment, which servers elsewhere need, too."""
    return {name: os.environ[name] for name in SECRETS if os.environ.get(name)}


@dataclass(frozen=True)
class Servers:
    """The addresses of an evaluation's servers."""

    engine: Endpoint
    """The router or the one engine; of a foreign server the base URL of its OpenAI routes."""
    reward: Endpoint
    gateway: Endpoint | None
    """For agents; None without."""
    environments: Endpoint | None
    """For tasks; None without."""
    start_seconds: float
    """The wait for the first answer."""
    watch: Watch
    """Raises an error once servers that were started have failed for good."""


@asynccontextmanager
async def servers_for(plan: Plan, say: Say) -> AsyncIterator[Servers]:
    """Yield the servers of a plan; end on exit those that were started.

    Engines that run already are those of the options, else the router of this job group. The reward-server is the given
    one, else that of this job group; outside a job group one is started here. Agents get a gateway here.

    Raises:
        ConfigurationError: a started server refuses its configuration; the message has the end of its log.
        DependencyLostError: a started server failed for good, or was not ready in time.
    """
    async with AsyncExitStack() as stack:
        watches: list[Watch] = []

        async def start(tasks: Sequence[TaskSpec], others: Mapping[str, str]) -> Addresses:
            group = JobGroup("evaluation", tuple(tasks))
            addresses, watch = await stack.enter_async_context(_supervised(group, plan.output, say, others))
            watches.append(watch)
            return addresses

        async def watch_all() -> None:
            await run_until_first_ends(asyncio.Event().wait(), *(watch() for watch in watches))

        engine, start_seconds = _running(plan), JOB_GROUP_START_SECONDS if in_job_group() else START_SECONDS
        if engine is None:
            start_seconds = LOCAL_START_SECONDS
            directory = plan.output / "servers" / f"engines-{uuid.uuid4().hex[:8]}"
            task, known = _engines(plan, directory)
            directory.mkdir(parents=True)
            addresses = await start([task], {})
            if plan.servers.starts in CLUSTERS:
                file = directory / clusters.ADDRESS
                await run_until_first_ends(_until_exists(file), watch_all())
                known = parse_url(file.read_text("utf-8"))
                endpoints.ask_directly(known.host)
            engine = known or parse_url(addresses.find(Task.ROLLOUT_SERVER, 0, endpoints.ROUTER_PORT))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-"))
        tasks = _others(plan, engine, scratch)
        authority = engine.url.removeprefix("http://")
        router = {f"{Task.ROLLOUT_SERVER}-0:{endpoints.ROUTER_PORT}": authority} if plan.needs_gateway else {}
        found = (await start(tasks, router)).endpoints if tasks else {}

        def address(task: Task) -> Endpoint | None:
            text = found.get(f"{task}-0:{endpoints.PORTS[task][0]}")
            return parse_url(text) if text else None

        url = plan.servers.reward_url
        reward = (parse_url(url) if url else address(Task.REWARD_SERVER)) or endpoints.endpoint(Task.REWARD_SERVER)
        agents = address(Task.GATEWAY), address(Task.ENVIRONMENT_SERVER)
        yield Servers(engine, reward, *agents, start_seconds, watch_all)


async def _until_exists(path: Path) -> None:
    # Another machine makes it.
    while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110
        await asyncio.sleep(clusters.POLL_SECONDS)


def _running(plan: Plan) -> Endpoint | None:
    """Return the engine that runs already; None where one is started."""
    if plan.servers.starts is not None:
        return None
    if plan.servers.endpoint:
        return parse_url(plan.servers.endpoint, is_api=True)
    return parse_url(plan.servers.url) if plan.servers.url else endpoints.endpoint(Task.ROLLOUT_SERVER)


def _engines(plan: Plan, directory: Path) -> tuple[TaskSpec, UrlEndpoint | None]:
    """Return the task that serves the model, and its address where that is not a router of the local runner.

    ``directory`` is for the address of a router on a cluster.
    """
    number, gpus, model = plan.servers.num_servers or 1, len(machine.visible_gpus()), plan.checkpoint.model
    variables, address = {"MODEL_NAME": model}, None
    user = {**os.environ, **plan.variables}
    on_gpus = plan.gpus_each if user.get("ROLLOUT_ENGINE") != "embedded" else 0
    command = "python -m services.rollout_server"
    if plan.servers.starts is Scheduler.SLURM:
        command = clusters.slurm_command(number, on_gpus, directory)
    elif plan.servers.starts is Scheduler.RAY:
        names = sorted({*plan.variables, *variables, *secrets()})
        command = clusters.ray_command(number, on_gpus, directory, names)
    elif plan.servers.backend is Backend.VLLM:
        address = parse_url(f"http://127.0.0.1:{nodes.free_port()}/v1", is_api=True)
        sizes = f"--tensor-parallel-size {plan.gpus_each} --data-parallel-size {number}"
        words = ["vllm", "serve", model, "--served-model-name", model, "--host", address.host]
        command = f"{shlex.join(words)} --port {address.port} {sizes} {user.get('VLLM_FLAGS', '')}"
        variables |= {"VLLM_API_KEY": plan.settings.token} if plan.settings.token else {}
    task = _task(plan, Task.ROLLOUT_SERVER, f"exec {command}", **variables)
    if plan.servers.starts in CLUSTERS:
        # Started again it would have another address. A local Ray shares out this machine's GPUs.
        once = replace(task, max_restarts_on_errors=0, recover_on_exit_codes=frozenset())
        return replace(once, gpus_per_node=gpus), None
    nodes_here = 1 if address else number
    return replace(task, num_nodes=nodes_here, gpus_per_node=gpus // nodes_here), address


def _others(plan: Plan, engine: Endpoint, scratch: str) -> list[TaskSpec]:
    """Return the tasks to start here beside the engines.

    The ``scratch`` directory is for the gateway's database, which needs a disk of this machine, and no more later on.

    Raises:
        ConfigurationError: there is an agent, but no gateway could reach the engine.
    """
    tasks = []
    if not plan.servers.reward_url and not (plan.servers.starts is None and in_job_group()):
        tasks.append(_task(plan, Task.REWARD_SERVER, "exec python -m services.reward_server"))
    if plan.needs_gateway:
        if not engine.url.startswith("http://") or urlsplit(engine.url).path:
            raise ConfigurationError(f"--url {engine.url}: an agent needs the router's address, http://host:port")
        variables = {"MODEL_NAME": plan.checkpoint.model, "GATEWAY_DIR": scratch}
        tasks.append(_task(plan, Task.GATEWAY, "exec python -m services.gateway", **variables))
    if plan.tasks:
        command = "exec python -m services.environment_server"
        tasks.append(_task(plan, Task.ENVIRONMENT_SERVER, command, ENVIRONMENT="sandbox", ROLLOUT="environment"))
    return tasks


def _task(plan: Plan, name: Task, command: str, **variables: str) -> TaskSpec:
    """Return a task, which is primary, so that its end is noticed."""
    return TaskSpec(
        name=name.value,
        run=command,
        environment={**plan.variables, **variables},
        max_restarts_on_errors=MAX_RESTARTS,
        recover_on_exit_codes=frozenset({EXIT_RECOVERABLE}),
        is_primary=True,
    )


@asynccontextmanager
async def _supervised(
    group: JobGroup, output: Path, say: Say, others: Mapping[str, str]
) -> AsyncIterator[tuple[Addresses, Watch]]:
    """Run a job group on this machine within the context; yield its addresses and what raises an error at its end.

    ``others`` are the addresses of nodes that do not belong to the group, as JOBGROUP_ENDPOINTS has them.
    """
    with nodes.allocate(group) as addresses:
        # For agents that ask the gateway with clients of their own.
        endpoints.ask_directly(*chain(*addresses.hosts.values()))
        run = LocalRun(
            group=group,
            run_id="servers",
            shared_dir=output / "servers",
            addresses=replace(addresses, endpoints={**addresses.endpoints, **others}),
            gpus=machine.visible_gpus(),
            mark=f"evaluation-{uuid.uuid4().hex}",
        )
        counts = " and ".join(f"{task.num_nodes} {task.name}" for task in group.tasks)
        say(f"starting {counts}; logs in {run.run_dir / 'logs'}")

        def report(task: TaskSpec, rank: int | None, state: State, why: str) -> None:
            if state in (State.FAILED, State.RESTARTING):
                say(f"{task.name}{'' if rank is None else f'-{rank}'} {state.value}: {why}")

        supervisor, files = Supervisor(run, report), Run(run.run_dir)

        async def watch() -> None:
            outcome = await asyncio.shield(job)
            logs = (log for log in files.logs() if log.stem.rpartition("-")[0] in addresses.hosts)
            lines = [f"{log.name}: {line}" for log in logs for line in files.log_end(log.stem)[-LOG_LINES:]]
            message = "\n".join([f"the servers ended: {outcome.reason}", *lines])
            is_configuration = outcome.exit_code == EXIT_CONFIGURATION
            raise ConfigurationError(message) if is_configuration else DependencyLostError(message)

        with processes.guard(run.mark):
            job = asyncio.create_task(supervisor.run())
            try:
                yield addresses, watch
            finally:
                supervisor.stop(signal.SIGTERM)
                await asyncio.gather(job, return_exceptions=True)
