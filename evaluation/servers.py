"""The servers of an evaluation: started on this machine by the local runner, by Slurm or Ray, or running already.

With SkyPilot (``skypilot.py``) the whole evaluation runs elsewhere, together with its servers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import HttpUrl, TypeAdapter, ValidationError

from evaluation import clusters
from evaluation.clusters import Watch
from evaluation.plan import Backend, Plan, Scheduler, in_job_group
from local_runner import nodes, processes
from local_runner.nodes import Addresses, Run
from local_runner.spec import JobGroup, TaskSpec
from local_runner.supervisor import State, Supervisor
from services.core import endpoints, machine
from services.core.endpoints import Endpoint, Task
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError
from services.core.tasks import run_until_first_ends

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

Say = Callable[[str], None]


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
    start_seconds: float
    """The wait for the first answer."""
    watch: Watch
    """Raises an error once servers that were started have failed for good."""


@asynccontextmanager
async def servers_for(plan: Plan, model: str, output: Path, say: Say) -> AsyncIterator[Servers]:
    """Yield the servers of a plan; end on exit those that were started.

    Engines that run already are those of the options, else the router of this job group. The reward-server is the given
    one, else that of this job group; outside a job group one is started here. Agents get a gateway here.

    Raises:
        ConfigurationError: a started server refuses its configuration; the message has the end of its log.
        DependencyLostError: a started server failed for good, or was not ready in time.
    """
    async with AsyncExitStack() as stack:
        watches: list[Watch] = []
        engine, start_seconds = _running(plan), START_SECONDS
        if plan.servers.starts in (Scheduler.SLURM, Scheduler.RAY):
            url, watch = await stack.enter_async_context(_on_cluster(plan, model, output, say))
            engine, start_seconds = parse_url(url), LOCAL_START_SECONDS
            watches.append(watch)
        elif engine is None:
            start_seconds = LOCAL_START_SECONDS
        elif in_job_group():
            start_seconds = JOB_GROUP_START_SECONDS
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-")))
        tasks, vllm = _tasks(plan, model, engine, directory)
        addresses = Addresses({}, {})
        if tasks:
            router = {f"{Task.ROLLOUT_SERVER}-0:{endpoints.ROUTER_PORT}": _authority(engine)} if engine else {}
            group = JobGroup("evaluation", tuple(tasks))
            addresses, watch = await stack.enter_async_context(_supervised(group, output, say, router))
            watches.append(watch)

        async def watch_all() -> None:
            await run_until_first_ends(asyncio.Event().wait(), *(watch() for watch in watches))

        def found(task: Task) -> Endpoint | None:
            address = addresses.endpoints.get(f"{task}-0:{endpoints.PORTS[task][0]}")
            return parse_url(address) if address else None

        reward_url = plan.servers.reward_url
        reward = parse_url(reward_url) if reward_url else found(Task.REWARD_SERVER)
        engine = engine or vllm or found(Task.ROLLOUT_SERVER)
        assert engine is not None
        yield Servers(
            engine,
            reward or endpoints.endpoint(Task.REWARD_SERVER),
            found(Task.GATEWAY),
            start_seconds,
            watch_all,
        )


def _running(plan: Plan) -> Endpoint | None:
    """Return the engine that runs already; None where one is started."""
    if plan.servers.starts is not None:
        return None
    if plan.servers.endpoint:
        return parse_url(plan.servers.endpoint, is_api=True)
    return parse_url(plan.servers.url) if plan.servers.url else endpoints.endpoint(Task.ROLLOUT_SERVER)


def _authority(engine: Endpoint) -> str:
    """Return ``host:port`` of an engine, as the gateway reaches it; of one that no gateway can reach, what is given."""
    return engine.url.removeprefix("http://")


@asynccontextmanager
async def _on_cluster(plan: Plan, model: str, output: Path, say: Say) -> AsyncIterator[tuple[str, Watch]]:
    """Start rollout nodes by Slurm or Ray; yield the URL of their router once it is known, and their watch."""
    number = plan.servers.num_servers or 1
    if plan.servers.starts is Scheduler.SLURM:
        directory = output / "servers" / f"slurm-{uuid.uuid4().hex[:8]}"
        directory.mkdir(parents=True)
        say(f"submitting {number} nodes to Slurm; log and address in {directory}")
        starting = clusters.on_slurm(slurm_script(plan, model, directory), directory)
    else:
        say(f"asking Ray for {number} nodes")
        starting = clusters.on_ray(number, plan.gpus_each, {**plan.variables, **secrets(), "MODEL_NAME": model})
    async with starting as (url, watch):
        endpoints.ask_directly(urlsplit(url).hostname or "")
        yield url, watch


def slurm_script(plan: Plan, model: str, directory: Path) -> str:
    """Return the batch file of the rollout nodes of a plan; ``directory`` gets their log and their address."""
    variables = {**plan.variables, "MODEL_NAME": model}
    return clusters.slurm_script(plan.servers.num_servers or 1, plan.gpus_each, variables, directory)


def _tasks(plan: Plan, model: str, engine: Endpoint | None, directory: Path) -> tuple[list[TaskSpec], Endpoint | None]:
    """Return the tasks to start here, and the address of vLLM if it is one of them.

    The ``directory`` is for the gateway's database, which needs a disk of this machine, and is of no use later on.

    Raises:
        ConfigurationError: there is an agent, but no gateway could reach the engine.
    """
    tasks, vllm = [], None
    if not plan.servers.reward_url and not (plan.servers.starts is None and in_job_group()):
        tasks.append(_task(plan, Task.REWARD_SERVER, "exec python -m services.reward_server"))
    if any(plan.agents.values()):
        if engine and (not engine.url.startswith("http://") or urlsplit(engine.url).path):
            raise ConfigurationError(
                f"--url {engine.url}: with an agent give the router's own address, http://host:port"
            )
        variables = {"MODEL_NAME": model, "GATEWAY_DIR": str(directory)}
        tasks.append(_task(plan, Task.GATEWAY, "exec python -m services.gateway", **variables))
    if engine is None:
        number, gpus = plan.servers.num_servers or 1, len(machine.visible_gpus())
        command = "exec python -m services.rollout_server"
        if plan.servers.backend is Backend.VLLM:
            vllm = _free_address()
            command, number, gpus = _vllm(plan, model, vllm, number), 1, gpus * number
        one = _task(plan, Task.ROLLOUT_SERVER, command, MODEL_NAME=model)
        tasks.append(replace(one, num_nodes=number, gpus_per_node=gpus // number))
    return tasks, vllm


def _vllm(plan: Plan, model: str, address: Endpoint, number: int) -> str:
    """Return the command of ``vllm serve`` at an address, with ``number`` engines."""
    flags = {**os.environ, **plan.variables}.get("VLLM_FLAGS", "")
    sizes = ["--tensor-parallel-size", str(plan.gpus_each), "--data-parallel-size", str(number)]
    words = ["vllm", "serve", model, "--served-model-name", model, "--host", address.host, "--port", str(address.port)]
    return f'VLLM_API_KEY="${{JOBGROUP_TOKEN:-}}" exec {shlex.join([*words, *sizes])} {flags}'


def _free_address() -> UrlEndpoint:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return parse_url(f"http://127.0.0.1:{probe.getsockname()[1]}/v1", is_api=True)


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
        run = Run(
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


def _ends_of_logs(run: Run) -> str:
    logs = sorted(path for task in run.group.tasks for path in (run.run_dir / "logs").glob(f"{task.name}-*.log"))
    ends: dict[str, Sequence[str]] = {
        log.name: log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:] for log in logs
    }
    return "\n".join(f"{name}: {line}" for name, lines in ends.items() for line in lines)
