"""The nodes of a run on this machine: their addresses, GPUs and environment variables.

Linux answers on all of 127.0.0.0/8. There each node has an address 127.x.y.k of its own and listens on its usual ports;
a free port replaces a usual one that another program has on all addresses. Elsewhere only 127.0.0.1 answers: nodes
share it, and each of their ports is mapped to a free one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_runner.processes import MARK
from local_runner.spec import JobGroup, TaskSpec
from services.core import machine
from services.core.endpoints import (
    APART_VARIABLE,
    ENDPOINTS_VARIABLE,
    ENGINE_PORT,
    PORTS,
    TASK_VARIABLE,
    Task,
    component_of,
)
from services.core.errors import ConfigurationError

BLOCK_TRIES = 64
GUARD_PORT = 30999
"""A run binds this port of its block of addresses to reserve the block; no component listens there."""


@dataclass(frozen=True)
class Addresses:
    """The addresses of a run's nodes."""

    hosts: dict[str, list[str]]
    """Host by task and rank."""
    endpoints: dict[str, str]
    """``host:port`` by ``{task}-{rank}:{port}``, as JOBGROUP_ENDPOINTS has it."""

    @property
    def variable(self) -> str:
        """The value of JOBGROUP_ENDPOINTS."""
        return json.dumps(self.endpoints)

    def find(self, task: str, rank: int, port: int) -> str:
        """Return the ``host:port`` that stands for ``port`` of node ``rank`` of ``task``."""
        return self.endpoints[f"{task}-{rank}:{port}"]


@contextlib.contextmanager
def allocate(group: JobGroup, *, own_hosts: bool | None = None) -> Iterator[Addresses]:
    """Yield addresses for every node of ``group``, which no other run gets within the context.

    ``own_hosts`` says whether each node has a host of its own; None: wherever the machine allows it.

    Raises:
        ConfigurationError: no free block of addresses was found.
    """
    if own_hosts is None:
        own_hosts = _can_listen("127.77.77.77", 0)
    count = sum(task.num_nodes for task in group.tasks)
    if not own_hosts:
        yield _addresses(group, ["127.0.0.1"] * count, keep_ports=False)
        return
    with contextlib.ExitStack() as stack:
        for _ in range(BLOCK_TRIES):
            block = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
            guard = stack.enter_context(socket.socket())
            try:
                guard.bind((f"{block}.1", GUARD_PORT))
            except OSError:  # another run has the block
                continue
            yield _addresses(group, [f"{block}.{number + 2}" for number in range(count)], keep_ports=True)
            return
        raise ConfigurationError(
            f"another program has port {GUARD_PORT} of {BLOCK_TRIES} loopback addresses; end it, or give --shared-host"
        )


def health_address(addresses: Mapping[str, str], node: str) -> str | None:
    """Return the ``host:port`` at which a node, such as ``reward-server-0``, answers /health; None if at none.

    Args:
        addresses: ``host:port`` by ``node:port``, as JOBGROUP_ENDPOINTS has it.
        node: task and rank.
    """
    task, _, rank = node.rpartition("-")
    component = component_of(task)
    # Of the trainer only the first rank listens.
    if component not in set(Task) or not PORTS[Task(component)] or (task == Task.TRAINER and rank != "0"):
        return None
    # The first rollout node is up once its router is.
    port = ENGINE_PORT if task == Task.ROLLOUT_SERVER and rank != "0" else PORTS[Task(component)][0]
    return addresses.get(f"{node}:{port}")


def trainer_address(addresses: Mapping[str, str]) -> str | None:
    """Return the ``host:port`` of the trainer's status page; None in a run without a trainer."""
    return health_address(addresses, f"{Task.TRAINER.value}-0")


def _addresses(group: JobGroup, node_hosts: Sequence[str], *, keep_ports: bool) -> Addresses:
    """Return the addresses of all nodes, whose hosts are ``node_hosts`` in the order of the file."""
    hosts: dict[str, list[str]] = {}
    endpoints = {}
    with contextlib.ExitStack() as stack:
        ranks = [(task, rank) for task in group.tasks for rank in range(task.num_nodes)]
        for host, (task, rank) in zip(node_hosts, ranks, strict=True):
            hosts.setdefault(task.name, []).append(host)
            for port in [port for name in task.components if name in set(Task) for port in PORTS[Task(name)]]:
                # All ports stay bound until the last is found, so that no two nodes get the same.
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port if keep_ports and _can_listen(host, port) else 0))
                endpoints[f"{task.name}-{rank}:{port}"] = f"{host}:{probe.getsockname()[1]}"
    return Addresses(hosts, endpoints)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _can_listen(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class LocalRun:
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


def node_environment(run: LocalRun, task: TaskSpec, rank: int) -> dict[str, str]:
    """Return all variables of node ``rank`` of ``task``; the task's own win over this machine's.

    The machine's CUDA_VISIBLE_DEVICES says which GPUs the run has (``LocalRun.gpus``); a node gets its share of them.
    """
    hosts = run.addresses.hosts[task.name]
    gpus = gpus_of(run, task, rank)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SKYPILOT_")}
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # As Ray does on SkyPilot's nodes.
        machine.THREADS_VARIABLE: machine.RAY_THREADS,
    }
    if sys.platform == "linux":
        # A thread that waits for others sleeps at once. By default libgomp lets it spin, which on a busy machine takes
        # the core from the thread that it waits for: docs/benchmarks.md has the figures. macOS was not measured.
        defaults["OMP_WAIT_POLICY"] = "passive"
    share = {machine.VISIBLE_GPUS_VARIABLE: ",".join(gpus)} if run.gpus else {}
    variables = _with_local_mounts(task.environment, task.mounts, run.shared_dir)
    threads = (inherited | variables).get(machine.THREADS_VARIABLE)
    fixed = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "RUN_ID": run.run_id,
        "SKYPILOT_JOBGROUP_NAME": run.group.name,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(hosts),
        "SKYPILOT_NUM_NODES": str(task.num_nodes),
        machine.PROMISED_GPUS_VARIABLE: str(len(gpus)),
        # Nodes of one task compute at the same time; different tasks mostly take turns.
        machine.CORES_VARIABLE: threads or str(max(1, machine.cores() // task.num_nodes)),
        "SKYPILOT_TASK_ID": f"local-{run.run_id}-{run.mark}_{run.group.name}_{task.name}",
        ENDPOINTS_VARIABLE: run.addresses.variable,
        TASK_VARIABLE: task.name,
        APART_VARIABLE: str(tiers_have_own_gpus(run)).lower(),
        MARK: run.node_mark(task, rank),
    }
    return defaults | inherited | share | variables | fixed


def tiers_have_own_gpus(run: LocalRun) -> bool:
    """Return whether engines and trainer have different GPUs on this machine."""
    gpus: dict[str, set[str]] = {Task.ROLLOUT_SERVER: set(), Task.TRAINER: set()}
    for task in run.group.tasks:
        for rank in range(task.num_nodes) if task.name in gpus else ():
            gpus[task.name].update(gpus_of(run, task, rank))
    engines, trainer = gpus.values()
    return bool(engines and trainer) and engines.isdisjoint(trainer)


def check_mounts(group: JobGroup) -> None:
    """Check that the group mounts at most one volume, because one directory stands for it.

    Raises:
        ConfigurationError: the group mounts several.
    """
    volumes = sorted({volume for task in group.tasks for volume in task.mounts.values()})
    if len(volumes) > 1:
        raise ConfigurationError(f"job group {group.name} mounts {volumes}; the local runner stands in for one volume")


def check_gpus(run: LocalRun) -> None:
    """Check that every node of the trainer has GPUs of its own, because NCCL joins no two ranks on one GPU.

    Raises:
        ConfigurationError: this machine has too few.
    """
    for task in run.group.tasks:
        gpus = [gpu for rank in range(task.num_nodes) for gpu in gpus_of(run, task, rank)]
        if task.name == Task.TRAINER and len(set(gpus)) < len(gpus):
            here = ", ".join(sorted(set(gpus)))
            raise ConfigurationError(
                f"{task.num_nodes} nodes of {task.name} need {task.gpus_per_node} GPUs each; they may use {here} here; "
                f"give --num-nodes {task.name}=1, or --env {machine.VISIBLE_GPUS_VARIABLE}= to compute on the processor"
            )


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


def gpus_of(run: LocalRun, task: TaskSpec, rank: int) -> list[str]:
    """Return the GPUs of a node: those that its task's variables name, else the next ones in the order of the file.

    Nodes share GPUs in turn when the machine has too few.
    """
    if not run.gpus or not task.gpus_per_node:
        return []
    if machine.VISIBLE_GPUS_VARIABLE in task.environment:
        return machine.listed_gpus(task.environment[machine.VISIBLE_GPUS_VARIABLE])
    before = run.group.tasks[: [other.name for other in run.group.tasks].index(task.name)]
    first = sum(other.num_nodes * other.gpus_per_node for other in before) + rank * task.gpus_per_node
    return sorted({run.gpus[(first + i) % len(run.gpus)] for i in range(task.gpus_per_node)})
