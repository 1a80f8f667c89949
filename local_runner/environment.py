"""The environment of a node's process: what SkyPilot sets, the task's variables, and what one machine needs besides."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_runner.gpus import VISIBLE, listed
from local_runner.nodes import Addresses
from local_runner.processes import MARK
from local_runner.spec import JobGroup, TaskSpec
from services.core.endpoints import ENDPOINTS_VARIABLE, Task
from services.core.errors import ConfigurationError


@dataclass(frozen=True)
class Run:
    """What the nodes of one run have in common."""

    group: JobGroup
    run_id: str
    shared_dir: Path
    """Stands for the group's volume."""
    addresses: Addresses
    gpus: tuple[str, ...] = ()
    """This machine's GPUs, by index."""
    mark: str = ""

    @property
    def run_dir(self) -> Path:
        """Where components write; see the settings' ``run_dir``."""
        return self.shared_dir / "runs" / self.run_id

    def log(self, task: TaskSpec, rank: int) -> Path:
        """The log of a node."""
        return self.run_dir / "logs" / f"{task.name}-{rank}.log"

    def node_mark(self, task: TaskSpec, rank: int) -> str:
        """What marks the processes of a node."""
        return f"{self.mark}/{task.name}-{rank}"


def node_environment(run: Run, task: TaskSpec, rank: int) -> dict[str, str]:
    """All variables of node ``rank`` of ``task``; a task's own win over this machine's."""
    hosts = run.addresses.hosts[task.name]
    gpus = _gpus_of(run, task, rank)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SKYPILOT_")}
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Nodes of one task compute at once; different tasks mostly take turns.
        "OMP_NUM_THREADS": str(max(1, cores() // task.num_nodes)),
    }
    if run.gpus:
        defaults[VISIBLE] = ",".join(gpus)
    own = _with_local_mounts(task.environment, task.mounts, run.shared_dir)
    fixed = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "RUN_ID": run.run_id,
        "SKYPILOT_JOBGROUP_NAME": run.group.name,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(hosts),
        "SKYPILOT_NUM_NODES": str(task.num_nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(len(gpus)),
        "SKYPILOT_TASK_ID": f"local-{run.run_id}_{run.group.name}_{task.name}",
        ENDPOINTS_VARIABLE: run.addresses.variable,
        MARK: run.node_mark(task, rank),
    }
    return defaults | inherited | own | fixed


def check_mounts(group: JobGroup) -> None:
    """One volume can be stood for by a directory.

    Raises:
        ConfigurationError: the group mounts several volumes.
    """
    volumes = sorted({volume for task in group.tasks for volume in task.mounts.values()})
    if len(volumes) > 1:
        raise ConfigurationError(f"the local runner stands in for one volume; job group {group.name} mounts {volumes}")


def check_gpus(run: Run) -> None:
    """Every node of the trainer has GPUs of its own: NCCL joins no two ranks on the same one.

    Raises:
        ConfigurationError: this machine has too few.
    """
    for task in run.group.tasks:
        given = [gpu for rank in range(task.num_nodes) for gpu in _gpus_of(run, task, rank)]
        if task.name == Task.TRAINER and len(set(given)) < len(given):
            raise ConfigurationError(
                f"the {task.num_nodes} nodes of {task.name} cannot share GPUs and ask for {task.gpus_per_node} each; "
                f"they may use {', '.join(sorted(set(given)))} here. Give --num-nodes {task.name}=1, or "
                f"--env {VISIBLE}= to compute on the processor"
            )


def new_run_id(group: JobGroup) -> str:
    """A name that sorts by time."""
    return f"{group.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_local_mounts(variables: Mapping[str, str], mounts: Mapping[str, str], directory: Path) -> dict[str, str]:
    """``variables`` in which every path below a mount path leads to ``directory`` instead."""
    result = dict(variables)
    for name, value in variables.items():
        for mount in mounts:
            if value == mount or value.startswith(mount.rstrip("/") + "/"):
                result[name] = str(directory) + value[len(mount.rstrip("/")) :]
    return result


def _gpus_of(run: Run, task: TaskSpec, rank: int) -> list[str]:
    """The GPUs of a node: its share of the machine's in order of the file, shared in turn when there are too few.

    A task whose own variables say what it sees has that instead.
    """
    if not run.gpus or not task.gpus_per_node:
        return []
    if VISIBLE in task.environment:
        return listed(task.environment[VISIBLE])
    first = 0
    for other in run.group.tasks:
        if other.name == task.name:
            break
        first += other.num_nodes * other.gpus_per_node
    first += rank * task.gpus_per_node
    return sorted({run.gpus[(first + i) % len(run.gpus)] for i in range(task.gpus_per_node)})
