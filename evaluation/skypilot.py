"""SkyPilot: an evaluation as a job group of its own, and the discovery of servers by their names.

This module alone imports SkyPilot. Of this project it imports the errors only, so that it also runs in an environment
made for SkyPilot.
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

YAML = Path(__file__).with_name("evaluate.yaml")
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
ROUTER_PORT = 30000
RESULTS_MARK = "results.json: "
"""The beginning of the line in which a job prints its results."""

Say = Callable[[str], None]


def load(num_servers: int, variables: Mapping[str, str], secrets: Mapping[str, str]) -> sky.Dag:
    """Return the job group of evaluation/evaluate.yaml with ``num_servers`` rollout nodes and further variables.

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
    """Launch an evaluation as a managed job group, follow its log, and return its results.

    Raises:
        ConfigurationError: SkyPilot does not launch it.
        DependencyLostError: the job ended without results.
    """
    group = load(num_servers, variables, secrets)
    from sky import jobs

    sky = _import_sky()
    group.name = name
    try:
        job_ids, _ = sky.stream_and_get(jobs.launch(group, name=name))
    # SkyPilot raises a dozen kinds of errors: no such cluster, a refused login, no such volume, ...
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


def discovery(prefix: str) -> Callable[[], Awaitable[Sequence[str]]]:
    """Return a function that discovers the clusters and SkyServe services whose names begin with ``prefix``.

    Raises:
        ConfigurationError: SkyPilot is not installed.
    """
    _import_sky()

    async def discover() -> Sequence[str]:
        return await asyncio.to_thread(find, prefix)

    return discover


def find(prefix: str) -> list[str]:
    """Return the routers' URLs of clusters and services whose names begin with ``prefix`` and that are up.

    Raises:
        DependencyLostError: SkyPilot's API server does not answer.
    """
    sky = _import_sky()
    from sky import exceptions

    try:
        clusters = [record["name"] for record in sky.get(sky.status(all_users=True))]
    # The client raises many kinds of errors, of the network or of the server; it is asked again later.
    except Exception as error:
        raise DependencyLostError(f"SkyPilot cannot be asked for its clusters: {error}") from error
    urls = []
    for name in clusters:
        if name.startswith(prefix):
            try:
                urls += list(sky.get(sky.endpoints(name, port=ROUTER_PORT)).values())
            except (exceptions.ClusterNotUpError, ValueError, RuntimeError):
                continue  # not up, or without that port: perhaps the next time
    try:
        services = sky.get(sky.serve.status(None))
    except RuntimeError:
        services = []  # there is no service at all
    urls += [s["endpoint"] for s in services if s["name"].startswith(prefix) and s.get("endpoint")]
    return sorted(set(urls))


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


def _import_sky() -> Any:
    try:
        import sky
    except ImportError as error:
        raise ConfigurationError(
            f"SkyPilot cannot be imported ({error}); install it with pip install 'skypilot[kubernetes]==0.14.1'"
        ) from error
    return sky
