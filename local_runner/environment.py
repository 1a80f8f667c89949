"""The environment of a node's process: SkyPilot's variables, the task's own, and defaults for a single machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_runner.nodes import Addresses
from local_runner.processes import MARK
from local_runner.spec import JobGroup, TaskSpec
from services.core.endpoints import ENDPOINTS_VARIABLE, Task
from services.core.errors import ConfigurationError
from services.core.machine import (
    CORES_VARIABLE,
    PROMISED_GPUS_VARIABLE,
    RAY_THREADS,
    THREADS_VARIABLE,
    VISIBLE_GPUS_VARIABLE,
    cores,
    listed_gpus,
)


@dataclass(frozen=True)
class Run:
    """A run: its job group, directory, addresses and GPUs."""

    group: JobGroup
    run_id: str
    shared_dir: Path
    """The directory that stands for the group's volume."""
    addresses: Addresses
    gpus: tuple[str, ...] = ()
    """This machine's GPUs, by index."""
    mark: str = ""
    """The run's mark in the environment of its processes; see ``processes.MARK``."""

    @property
    def run_dir(self) -> Path:
        """The run directory, where components write."""
        return self.shared_dir / "runs" / self.run_id

    def log(self, task: TaskSpec, rank: int) -> Path:
        """Return the path of a node's log."""
        return self.run_dir / "logs" / f"{task.name}-{rank}.log"

    def node_mark(self, task: TaskSpec, rank: int) -> str:
        """Return the mark of a node's processes."""
        return f"{self.mark}/{task.name}-{rank}"


def node_environment(run: Run, task: TaskSpec, rank: int) -> dict[str, str]:
    """Return all variables of node ``rank`` of ``task``; the task's own win over this machine's.

    The machine's CUDA_VISIBLE_DEVICES says which GPUs the run has (``Run.gpus``); a node gets its share of them.
    """
    hosts = run.addresses.hosts[task.name]
    gpus = gpus_of(run, task, rank)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SKYPILOT_")}
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # As Ray does on SkyPilot's nodes.
        THREADS_VARIABLE: RAY_THREADS,
    }
    if sys.platform == "linux":
        # A thread that waits for others sleeps at once. By default libgomp lets it spin, which on a busy machine takes
        # the core from the thread that it waits for: docs/benchmarks/record.md has the figures. macOS was not measured.
        defaults["OMP_WAIT_POLICY"] = "passive"
    share = {VISIBLE_GPUS_VARIABLE: ",".join(gpus)} if run.gpus else {}
    own = _with_local_mounts(task.environment, task.mounts, run.shared_dir)
    threads = (inherited | own).get(THREADS_VARIABLE)
    fixed = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "RUN_ID": run.run_id,
        "SKYPILOT_JOBGROUP_NAME": run.group.name,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(hosts),
        "SKYPILOT_NUM_NODES": str(task.num_nodes),
        PROMISED_GPUS_VARIABLE: str(len(gpus)),
        # Nodes of one task compute at the same time; different tasks mostly take turns.
        CORES_VARIABLE: threads or str(max(1, cores() // task.num_nodes)),
        "SKYPILOT_TASK_ID": f"local-{run.run_id}-{run.mark}_{run.group.name}_{task.name}",
        ENDPOINTS_VARIABLE: run.addresses.variable,
        MARK: run.node_mark(task, rank),
    }
    return defaults | inherited | share | own | fixed


def check_mounts(group: JobGroup) -> None:
    """Check that the group mounts at most one volume, because one directory stands for it.

    Raises:
        ConfigurationError: the group mounts several.
    """
    volumes = sorted({volume for task in group.tasks for volume in task.mounts.values()})
    if len(volumes) > 1:
        raise ConfigurationError(
            f"the local runner has a directory for one volume; job group {group.name} mounts {volumes}"
        )


def check_gpus(run: Run) -> None:
    """Check that every node of the trainer has GPUs of its own, because NCCL joins no two ranks on one GPU.

    Raises:
        ConfigurationError: this machine has too few.
    """
    for task in run.group.tasks:
        given = [gpu for rank in range(task.num_nodes) for gpu in gpus_of(run, task, rank)]
        if task.name == Task.TRAINER and len(set(given)) < len(given):
            raise ConfigurationError(
                f"the {task.num_nodes} nodes of {task.name} cannot share GPUs and ask for {task.gpus_per_node} each; "
                f"they may use {', '.join(sorted(set(given)))} here. Give --num-nodes {task.name}=1, or "
                f"--env {VISIBLE_GPUS_VARIABLE}= to compute on the processor"
            )


def new_run_id(group: JobGroup) -> str:
    """Return a run id that sorts by time."""
    return f"{group.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _with_local_mounts(variables: Mapping[str, str], mounts: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return ``variables`` with every path below a mount path replaced by a path below ``directory``."""
    result = dict(variables)
    for name, value in variables.items():
        for mount in mounts:
            if value == mount or value.startswith(mount.rstrip("/") + "/"):
                result[name] = str(directory) + value[len(mount.rstrip("/")) :]
                if name == "HF_HUB_CACHE":
                    # All nodes have this machine's cache, which may have the model already.
                    del result[name]
    return result


def gpus_of(run: Run, task: TaskSpec, rank: int) -> list[str]:
    """Return the GPUs of a node: those that its task's variables name, else the next ones in the order of the file.

    Nodes share GPUs in turn when the machine has too few.
    """
    if not run.gpus or not task.gpus_per_node:
        return []
    if VISIBLE_GPUS_VARIABLE in task.environment:
        return listed_gpus(task.environment[VISIBLE_GPUS_VARIABLE])
    before = run.group.tasks[: [other.name for other in run.group.tasks].index(task.name)]
    first = sum(other.num_nodes * other.gpus_per_node for other in before) + rank * task.gpus_per_node
    return sorted({run.gpus[(first + i) % len(run.gpus)] for i in range(task.gpus_per_node)})
