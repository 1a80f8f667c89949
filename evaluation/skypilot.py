"""SkyPilot: an evaluation as a job group of its own, and the discovery of servers by their names.

Of this project it imports only errors, allocations and the evaluation head's discovery, so that it also runs in an
environment made for SkyPilot.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.node import Allocation
from services.core.errors import ConfigurationError, DependencyLostError, first_line
from services.evaluation_head.sky_servers import find_clusters, find_replicas

if TYPE_CHECKING:
    import sky

YAML = Path(__file__).with_name("evaluate.yaml")
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
ROUTER_PORT = 30000
RESULTS_MARK = "results.json: "
"""The beginning of the line in which a job prints its results."""

Say = Callable[[str], None]


def load(
    allocation: Allocation, variables: Mapping[str, str], secrets: Mapping[str, str], uploads: Mapping[str, str]
) -> sky.Dag:
    """Return the job group of evaluation/evaluate.yaml with the allocation's rollout nodes and further variables.

    ``uploads`` are directories of this machine, by their paths on the nodes that read models.

    Raises:
        ConfigurationError: SkyPilot is not installed, or refuses the file with these variables.
    """
    import_sky()
    from sky.utils import dag_utils

    try:
        group = dag_utils.load_job_group_from_yaml(
            str(YAML), env_overrides=list(variables.items()), secrets_overrides=list(secrets.items())
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"SkyPilot refuses {YAML}: {error}; is this a checkout of the project?") from error
    for task in group.tasks:
        if task.name == SERVERS_TASK:
            task.num_nodes = allocation.data
            task.update_envs(allocation.engine_variables(variables))
            task.set_resources(_with_gpus(task.resources, allocation.gpus))
        if task.name in (SERVERS_TASK, EVALUATE_TASK):
            task.update_file_mounts(dict(uploads))
    return group


def _with_gpus(resources: Any, count: int) -> Any:
    """Return the same choice of resources with ``count`` GPUs of each kind a node."""
    return type(resources)(one.copy(accelerators=dict.fromkeys(one.accelerators, count)) for one in resources)


def launch(
    name: str,
    allocation: Allocation,
    variables: Mapping[str, str],
    secrets: Mapping[str, str],
    uploads: Mapping[str, str],
    say: Say,
) -> dict[str, Any]:
    """Launch an evaluation as a managed job group, follow its log, and return its results.

    Raises:
        ConfigurationError: SkyPilot does not launch it.
        DependencyLostError: the job ended without results, or its log broke off.
    """
    group = load(allocation, variables, secrets, uploads)
    from sky import jobs

    sky = import_sky()
    group.name = name
    try:
        job_ids, _ = sky.stream_and_get(jobs.launch(group, name=name))
    # SkyPilot raises a dozen kinds of errors: no such cluster, a refused login, no such volume, ...
    except Exception as error:
        raise ConfigurationError(
            f"SkyPilot did not launch {name}: {first_line(error)}; try `sky check` and `sky api info`"
        ) from error
    job_id = job_ids[0]
    say(f"job {job_id} ({name}); its log: sky jobs logs {job_id} {EVALUATE_TASK}; to end it: sky jobs cancel {job_id}")
    log = _Log(say)
    try:
        code = jobs.tail_logs(job_id=job_id, task=EVALUATE_TASK, follow=True, output_stream=log)
    except Exception as error:
        raise DependencyLostError(
            f"the log of job {job_id} broke off ({first_line(error)}), and the job may still run: see sky jobs queue; "
            f"end it by sky jobs cancel {job_id} before another evaluation writes to its directory"
        ) from error
    if log.results is None:
        raise DependencyLostError(f"job {job_id} ended with {code} and no results; see sky jobs logs {job_id}")
    return log.results


def find(prefix: str) -> list[str]:
    """Return the URLs of clusters' routers and of services' replicas that are up and whose names begin with ``prefix``.

    Raises:
        DependencyLostError: SkyPilot cannot tell.
    """
    try:
        servers = find_clusters((prefix,), ROUTER_PORT) + find_replicas((prefix,))
    # SkyPilot raises a dozen kinds of errors, among them those of its HTTP library.
    except Exception as error:
        raise DependencyLostError(
            f"SkyPilot cannot tell its servers: {first_line(error)}; try `sky api info`"
        ) from error
    return sorted({server.url for server in servers if server.url is not None})


class _Log(io.TextIOBase):
    """A job's log: passes on every line, except the line with the results, which it keeps."""

    def __init__(self, say: Say) -> None:
        self.results: dict[str, Any] | None = None
        self._say = say
        self._line = ""

    def write(self, text: str) -> int:
        """Take a piece of the log."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            _, mark, rest = line.partition(RESULTS_MARK)
            if mark:
                self.results = json.loads(rest)
            else:
                self._say(line)
        return len(text)


def import_sky() -> Any:
    """Return SkyPilot's package.

    Raises:
        ConfigurationError: SkyPilot is not installed.
    """
    try:
        import sky
    except ImportError as error:
        raise ConfigurationError(
            f"SkyPilot cannot be imported ({error}); install it with pip install 'skypilot[kubernetes]==0.14.1'"
        ) from error
    return sky
