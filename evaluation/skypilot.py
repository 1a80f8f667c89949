"""SkyPilot: an evaluation as a job group of its own, and servers found by their names.

The only module of the evaluation that imports SkyPilot, and of this project it imports no more than the errors, so that
SkyPilot's own environment runs it.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.core.errors import ConfigurationError, DependencyLostError

if TYPE_CHECKING:
    import sky

YAML = Path(__file__).parents[1] / "evaluation" / "evaluate.yaml"
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
ROUTER_PORT = 30000
RESULTS_MARK = "results.json: "
"""Begins the line by which a job tells its results."""

Say = Callable[[str], None]


def load(num_servers: int, variables: Mapping[str, str], secrets: Mapping[str, str]) -> sky.Dag:
    """The job group of evaluation/evaluate.yaml with ``num_servers`` rollout nodes and further variables.

    Raises:
        ConfigurationError: SkyPilot is not installed, or refuses the file with these variables.
    """
    _import_sky()
    from sky.utils import dag_utils

    if not YAML.is_file():
        raise ConfigurationError(f"{YAML} does not exist; run this from a checkout of the project")
    try:
        group = dag_utils.load_job_group_from_yaml(
            str(YAML), env_overrides=list(variables.items()), secrets_overrides=list(secrets.items())
        )
    except ValueError as error:
        raise ConfigurationError(f"SkyPilot refuses {YAML.name}: {error}") from error
    for task in group.tasks:
        if task.name == SERVERS_TASK:
            task.num_nodes = num_servers
    return group


def launch(
    name: str, num_servers: int, variables: Mapping[str, str], secrets: Mapping[str, str], say: Say
) -> dict[str, Any]:
    """Launches an evaluation as a managed job group, follows its log, and returns its results.

    Raises:
        ConfigurationError: it cannot be launched.
        DependencyLostError: it ended without results.
    """
    group = load(num_servers, variables, secrets)
    from sky import jobs

    sky = _import_sky()
    group.name = name
    try:
        job_ids, _ = sky.stream_and_get(jobs.launch(group, name=name))
    # SkyPilot raises a dozen kinds for a cluster that is not there, a refused login, no such volume, ...
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"SkyPilot did not launch {name}: {line[:500]}; try `sky check` and `sky api info`"
        ) from error
    job_id = job_ids[0]
    say(f"job {job_id} ({name}); its log: sky jobs logs {job_id} {EVALUATE_TASK}; to end it: sky jobs cancel {job_id}")
    log = _Log(say)
    code = jobs.tail_logs(job_id=job_id, task=EVALUATE_TASK, follow=True, output_stream=log)
    if log.results is None:
        raise DependencyLostError(f"job {job_id} ended with {code} and no results; see sky jobs logs {job_id}")
    return log.results


def discovery(prefix: str, port: int = ROUTER_PORT) -> Callable[[], Awaitable[Sequence[str]]]:
    """Discovers the clusters and SkyServe services whose name begins with ``prefix``, by the router's port.

    Raises:
        ConfigurationError: SkyPilot is not installed.
    """
    _import_sky()

    async def discover() -> Sequence[str]:
        return await asyncio.to_thread(find, prefix, port)

    return discover


def find(prefix: str, port: int = ROUTER_PORT) -> list[str]:
    """URLs of what SkyPilot runs under names that begin with ``prefix``; what is not up yet has none.

    Raises:
        DependencyLostError: SkyPilot's API server cannot be asked.
    """
    sky = _import_sky()
    from sky import exceptions

    try:
        clusters = [record["name"] for record in sky.get(sky.status(all_users=True))]
    # Whatever its client raises, of the network or of the server: it is asked again later.
    except Exception as error:
        raise DependencyLostError(f"SkyPilot cannot be asked for its clusters: {error}") from error
    urls = []
    for name in clusters:
        if name.startswith(prefix):
            try:
                urls += list(sky.get(sky.endpoints(name, port=port)).values())
            except (exceptions.ClusterNotUpError, ValueError, RuntimeError):
                continue  # not up, or without that port: the next time, perhaps
    try:
        services = sky.get(sky.serve.status(None))
    except RuntimeError:
        services = []  # there is no service at all
    urls += [s["endpoint"] for s in services if s["name"].startswith(prefix) and s.get("endpoint")]
    return sorted(set(urls))


class _Log(io.TextIOBase):
    """What a job writes: passed on line by line, but the one with its results, which is kept."""

    def __init__(self, say: Say) -> None:
        self.results: dict[str, Any] | None = None
        self._say = say
        self._line = ""

    def write(self, text: str) -> int:
        """Takes a piece of the log."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            _, mark, rest = line.partition(RESULTS_MARK)
            if mark:
                self.results = json.loads(rest)
            else:
                self._say(line)
        return len(text)


def _import_sky() -> Any:
    try:
        import sky
    except ImportError as error:
        raise ConfigurationError(
            f"SkyPilot cannot be imported ({error}); install it with pip install 'skypilot[kubernetes]==0.14.1'"
        ) from error
    return sky
