"""SkyPilot: an evaluation as a job group of its own, evaluation/evaluate.yaml.

Of this project it imports only errors, so that it also runs in an environment made for SkyPilot.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.core.errors import ConfigurationError, DependencyLostError, first_line

if TYPE_CHECKING:
    import sky

YAML = Path(__file__).with_name("evaluate.yaml")
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
RESULTS_MARK = "results.json: "
"""The beginning of the line in which a job prints its results."""

Say = Callable[[str], None]


def load(
    number: int, gpus: int, variables: Mapping[str, str], secrets: Mapping[str, str], uploads: Mapping[str, str]
) -> sky.Dag:
    """Return the job group of evaluation/evaluate.yaml with ``number`` rollout nodes of ``gpus`` GPUs, and variables.

    ``uploads`` are directories of this machine, by their paths on the nodes that read models.

    Raises:
        ConfigurationError: SkyPilot is not installed, or refuses the file with these variables.
    """
    try:
        from sky.utils import dag_utils
    except ImportError as error:
        raise ConfigurationError(
            f"SkyPilot cannot be imported ({error}); install it with pip install 'skypilot[kubernetes]==0.14.1'"
        ) from error
    try:
        group = dag_utils.load_job_group_from_yaml(
            str(YAML), env_overrides=list(variables.items()), secrets_overrides=list(secrets.items())
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"SkyPilot refuses {YAML}: {error}; is this a checkout of the project?") from error
    for task in group.tasks:
        if task.name == SERVERS_TASK:
            task.num_nodes = number
            choices = (one.copy(accelerators=dict.fromkeys(one.accelerators, gpus)) for one in task.resources)
            task.set_resources(type(task.resources)(choices))
        if task.name in (SERVERS_TASK, EVALUATE_TASK):
            task.update_file_mounts(dict(uploads))
    return group


def launch(name: str, group: sky.Dag, say: Say) -> dict[str, Any]:
    """Launch a job group as a managed job, follow its log, and return its results.

    Raises:
        ConfigurationError: SkyPilot does not launch it.
        DependencyLostError: the job ended without results, or its log broke off.
    """
    import sky
    from sky import jobs

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
