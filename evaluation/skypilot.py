"""SkyPilot: an evaluation as a job group of its own, evaluation/evaluate.yaml."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from local_runner import skypilot
from services.core.errors import ConfigurationError, DependencyLostError

YAML = Path(__file__).with_name("evaluate.yaml")
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
RESULTS_MARK = "results.json: "
"""The beginning of the line in which a job prints its results."""


def job_group(name: str, number: int, gpus: int, variables: Mapping[str, str], uploads: Mapping[str, str]) -> str:
    """Return the YAML of an evaluation with ``number`` rollout nodes of ``gpus`` GPUs, and variables in every task.

    ``uploads`` are directories of this machine, by their paths on the nodes that read models.
    """
    text = YAML.read_text("utf-8").replace("\nname: evaluation\n", f"\nname: {name}\n", 1)
    written = skypilot.values(text)
    choices = re.sub(r":\d+", f":{gpus}", written[SERVERS_TASK, "resources.accelerators"])
    changes = {(SERVERS_TASK, "num_nodes"): str(number), (SERVERS_TASK, "resources.accelerators"): choices}
    for task in {task for task, _ in written}:
        given = {f"{skypilot.ENVS}.{variable}": value for variable, value in variables.items()}
        if task in (SERVERS_TASK, EVALUATE_TASK):
            given |= {f"file_mounts.{path}": source for path, source in uploads.items()}
        changes |= {(task, key): skypilot.scalar(value) for key, value in given.items()}
    return skypilot.edited(text, changes)


def launch(text: str, secrets: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Launch a job group as a managed job, follow the log of its evaluation, and return its results.

    Raises:
        ConfigurationError: SkyPilot is not installed, or does not launch it.
        DependencyLostError: the job ended without results, or its log broke off.
    """
    python = skypilot.interpreter()
    if python is None:
        raise ConfigurationError(f"SkyPilot is not installed: {skypilot.INSTALL}")
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        job, error = skypilot.ask(python, [Path(file.name)], secrets, launch=True)
    if job is None:
        raise ConfigurationError(f"SkyPilot did not launch the evaluation: {error}; try `sky check` and `sky api info`")
    say(f"job {job}; its log: sky jobs logs {job} {EVALUATE_TASK}; to end it: sky jobs cancel {job}")
    command, results = [str(python.with_name("sky")), "jobs", "logs", str(job), EVALUATE_TASK], None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as log:
        for line in log.stdout or ():
            _, mark, rest = line.partition(RESULTS_MARK)
            if mark:
                results = json.loads(rest)
            else:
                say(line.rstrip("\n"))
    if results is None:
        raise DependencyLostError(
            f"the log of job {job} ended with {log.returncode} and no results; if `sky jobs queue` still has the job, "
            f"end it by sky jobs cancel {job} before another evaluation writes to its directory"
        )
    found: dict[str, Any] = results
    return found
