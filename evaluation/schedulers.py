"""Where the servers of an evaluation come from: started here, or running already.

SkyPilot's part is in ``skypilot.py``: it has the whole evaluation run elsewhere, with the servers beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from evaluation.servers import Discover, address, parse_url
from local_runner import directory, gpus, nodes, watchdog
from local_runner.environment import Run
from local_runner.spec import JobGroup, TaskSpec
from local_runner.supervisor import State, Supervisor
from services.clients.reward import RewardClient
from services.clients.rollout_admin import RouterAdmin
from services.core import endpoints
from services.core.endpoints import Endpoint, Task
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError
from services.core.settings import Settings
from services.core.tasks import run_until_first_ends

LOCAL_START_SECONDS = 1800.0
"""For a model to be fetched and loaded."""
POLL_SECONDS = 0.2
MAX_RESTARTS = 3
LOG_LINES = 5

Say = Callable[[str], None]


async def _for_ever() -> None:
    await asyncio.Event().wait()


@dataclass(frozen=True)
class Servers:
    """What an evaluation asks."""

    urls: Sequence[str]
    reward: Endpoint
    discover: Discover | None = None
    watch: Callable[[], Awaitable[None]] = _for_ever
    """Raises when what was started here has failed for good."""


@asynccontextmanager
async def local(
    model: str | None, num_servers: int, output: Path, variables: Mapping[str, str], say: Say
) -> AsyncIterator[Servers]:
    """Starts a reward-server and, with a ``model``, ``num_servers`` rollout nodes behind one router, and ends them.

    Raises:
        ConfigurationError: a server cannot run as it is configured; the message has the end of its log.
        DependencyLostError: one failed for good, or was not ready in time.
    """
    group = _group(model, num_servers, variables)
    with nodes.allocate(group) as addresses:
        run = Run(
            group=group,
            run_id="servers",
            shared_dir=output / "servers",
            addresses=addresses,
            gpus=gpus.visible(),
            mark=f"evaluation-{uuid.uuid4().hex}",
        )
        say(f"starting {_names(group)}; logs in {run.run_dir / 'logs'}")

        def report(task: TaskSpec, rank: int | None, state: State, why: str) -> None:
            if state in (State.FAILED, State.RESTARTING):
                say(f"{task.name}{'' if rank is None else f'-{rank}'} {state.value}: {why}")

        supervisor = Supervisor(run, report)

        async def watch() -> None:
            outcome = await asyncio.shield(life)
            code = outcome.exit_code or EXIT_RECOVERABLE
            told = f"the servers ended: {outcome.reason}\n{_logs(run)}"
            raise ConfigurationError(told) if code == EXIT_CONFIGURATION else DependencyLostError(told)

        with watchdog.guard(run.mark):
            life = asyncio.create_task(supervisor.run())
            try:
                reward = _endpoint(addresses.find(Task.REWARD_SERVER, 0, endpoints.REWARD_PORT))
                router = _endpoint(addresses.find(Task.ROLLOUT_SERVER, 0, endpoints.ROUTER_PORT)) if model else None
                await run_until_first_ends(_ready(reward, router), watch())
                yield Servers([router.url] if router else [], reward, watch=watch)
            finally:
                supervisor.stop(signal.SIGTERM)
                await asyncio.gather(life, return_exceptions=True)


@asynccontextmanager
async def running(
    urls: Sequence[str],
    discover: Discover | None,
    reward_url: str | None,
    output: Path,
    variables: Mapping[str, str],
    say: Say,
) -> AsyncIterator[Servers]:
    """Servers that run already: those given, those discovered, else the router of this job group.

    Without a reward-server, in this job group or given, one is started here.

    Raises:
        ConfigurationError: none is given and this is no job group.
    """
    in_group = "SKYPILOT_JOBGROUP_NAME" in os.environ or endpoints.ENDPOINTS_VARIABLE in os.environ
    given = [parse_url(url) for url in urls]
    if not given and discover is None:
        if not in_group:
            raise ConfigurationError("--scheduler endpoints needs --url or --discover outside a job group")
        given = [endpoints.endpoint(endpoints.Task.ROLLOUT_SERVER).url]
    if reward_url is not None:
        yield Servers(given, address(parse_url(reward_url)), discover)
    elif in_group:
        yield Servers(given, endpoints.endpoint(endpoints.Task.REWARD_SERVER), discover)
    else:
        async with local(None, 0, output, variables, say) as servers:
            yield Servers(given, servers.reward, discover, servers.watch)


def local_run(run_dir: Path) -> Discover:
    """Discovers the router of a run of the local runner.

    Raises:
        ConfigurationError: it is no such run.
    """
    if not (run_dir / directory.FILE).is_file():
        raise ConfigurationError(f"--discover {run_dir} is not the directory of a run of scripts.run_local")

    async def discover() -> Sequence[str]:
        found = directory.read_nodes(run_dir)
        router = found and found.endpoints.get(f"{Task.ROLLOUT_SERVER.value}-0:{endpoints.ROUTER_PORT}")
        return [f"http://{router}"] if router else []

    return discover


async def _ready(reward: Endpoint, router: Endpoint | None) -> None:
    """Returns when the reward-server answers and the router has a worker."""
    token = Settings.load().token
    async with RewardClient(reward, token) as client:
        await client.wait_healthy(LOCAL_START_SECONDS)
    if router is None:
        return
    async with RouterAdmin(router, token) as control, asyncio.timeout(LOCAL_START_SECONDS):
        # The router tells nobody by itself.
        while not (await control.is_healthy() and await control.healthy_workers()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


def _group(model: str | None, num_servers: int, variables: Mapping[str, str]) -> JobGroup:
    """The tasks of jobgroup.yaml that an evaluation needs; each is primary, so that the end of one is noticed."""

    def task(name: Task, count: int, gpus_per_node: int, **own: str) -> TaskSpec:
        return TaskSpec(
            name=name.value,
            run=f"exec python -m services.{name.value.replace('-', '_')}",
            num_nodes=count,
            gpus_per_node=gpus_per_node,
            environment={**variables, **own},
            max_restarts_on_errors=MAX_RESTARTS,
            recover_on_exit_codes=frozenset({EXIT_RECOVERABLE}),
            is_primary=True,
        )

    tasks = [task(Task.REWARD_SERVER, 1, 0)]
    if model is not None:
        share = len(gpus.visible()) // num_servers
        tasks.append(task(Task.ROLLOUT_SERVER, num_servers, share, MODEL_NAME=model))
    return JobGroup("evaluation", tuple(tasks))


def _names(group: JobGroup) -> str:
    return " and ".join(f"{task.num_nodes} {task.name}" for task in group.tasks)


def _endpoint(address: str) -> Endpoint:
    host, _, port = address.rpartition(":")
    return Endpoint(host, int(port))


def _logs(run: Run) -> str:
    """The ends of all logs."""
    logs = sorted((run.run_dir / "logs").glob("*.log"))
    return "\n".join(f"{log.name}: {line}" for log in logs for line in log.read_text().splitlines()[-LOG_LINES:])
