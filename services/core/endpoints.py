"""Who listens where: the one place that knows task names, ports and addresses.

Under SkyPilot the node r of a task is reachable as ``{task}-{r}.{group}``, on its usual port, from every node of the
job group. The local runner gives every node an address of its own instead and says so in ``JOBGROUP_ENDPOINTS``, a JSON
object from ``{task}-{rank}:{port}`` to ``host:port``. Everything that connects or binds asks here, so nothing else
differs between a laptop and a cluster. Names are not resolved here: each new connection resolves them anew, since the
address of a node changes when it is recovered.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from services.core.errors import ConfigurationError


class Task(StrEnum):
    """The tasks of the job group, by their names in jobgroup.yaml, and the two services of the evaluation system."""

    DATA_SERVER = "data-server"
    ROLLOUT_SERVER = "rollout-server"
    REWARD_SERVER = "reward-server"
    REPLAY_BUFFER = "replay-buffer"
    TRAINER = "ppo-trainer"
    COLLECTOR = "collector"
    EVALUATION_HEAD = "evaluation-head"
    ENVIRONMENT_SERVER = "environment-server"


DATA_PORT = 8000
ROUTER_PORT = 30000
ENGINE_PORT = 30001
ROUTER_METRICS_PORT = 29000
# Where the router listens, to its own node only, when JOBGROUP_TOKEN puts an authenticating proxy on its port.
ROUTER_INNER_PORT = 30002
REWARD_PORT = 8002
REPLAY_PORT = 8003
STATUS_PORT = 8004
TRAINER_RENDEZVOUS_PORT = 29500
WEIGHTS_BROADCAST_PORT = 29600
EVALUATION_HEAD_PORT = 8080
ENVIRONMENT_PORT = 8081

# What the local runner has to find an address for, task by task.
PORTS: dict[Task, tuple[int, ...]] = {
    Task.DATA_SERVER: (DATA_PORT,),
    Task.ROLLOUT_SERVER: (ROUTER_PORT, ENGINE_PORT, ROUTER_METRICS_PORT, ROUTER_INNER_PORT),
    Task.REWARD_SERVER: (REWARD_PORT,),
    Task.REPLAY_BUFFER: (REPLAY_PORT,),
    Task.TRAINER: (STATUS_PORT, TRAINER_RENDEZVOUS_PORT, WEIGHTS_BROADCAST_PORT),
    Task.COLLECTOR: (),
    Task.EVALUATION_HEAD: (EVALUATION_HEAD_PORT,),
    Task.ENVIRONMENT_SERVER: (ENVIRONMENT_PORT,),
}

ENDPOINTS_VARIABLE = "JOBGROUP_ENDPOINTS"
NODE_RANK_VARIABLE = "SKYPILOT_NODE_RANK"
"""SkyPilot sets it on every node of every task."""
EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class Endpoint:
    """A host (name or address) and a port."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def endpoint(task: Task, port: int, rank: int = 0) -> Endpoint:
    """Where to reach ``port`` of node ``rank`` of ``task`` from any node of the job group.

    Outside a job group (no SKYPILOT_JOBGROUP_NAME) it is this machine.

    Raises:
        ConfigurationError: JOBGROUP_ENDPOINTS is malformed or lacks the node.
    """
    mapped = _mapped(task, port, rank)
    if mapped is not None:
        return mapped
    group = os.environ.get("SKYPILOT_JOBGROUP_NAME")
    return Endpoint(f"{task.value}-{rank}.{group}" if group else "127.0.0.1", port)


def bind_address(task: Task, port: int, rank: int | None = None) -> Endpoint:
    """Return where node ``rank`` of ``task`` (default: this node) listens on ``port``, unless it is given a ``--host``.

    On a node of SkyPilot's that is every interface, since the other nodes must reach it; elsewhere this machine alone.
    """
    mapped = _mapped(task, port, node_rank() if rank is None else rank)
    if mapped is not None:
        return mapped
    return Endpoint(EVERYWHERE if NODE_RANK_VARIABLE in os.environ else "127.0.0.1", port)


def reached_at(bind: Endpoint, usual: Endpoint) -> Endpoint:
    """Return where others reach what listens on ``bind``: at the host of ``usual`` where that is every interface."""
    return Endpoint(usual.host, bind.port) if bind.host in (EVERYWHERE, "::") else bind


def node_rank() -> int:
    """This node's rank within its task."""
    return _integer(NODE_RANK_VARIABLE, 0)


def num_nodes() -> int:
    """How many nodes this node's task has."""
    return _integer("SKYPILOT_NUM_NODES", 1)


def node_addresses() -> list[str]:
    """The addresses of the nodes of this node's own task, by rank."""
    return os.environ.get("SKYPILOT_NODE_IPS", "127.0.0.1").split()


def data_server() -> Endpoint:
    """The data-server."""
    return endpoint(Task.DATA_SERVER, DATA_PORT)


def router() -> Endpoint:
    """The router in front of the rollout workers."""
    return endpoint(Task.ROLLOUT_SERVER, ROUTER_PORT)


def reward_server() -> Endpoint:
    """The reward-server."""
    return endpoint(Task.REWARD_SERVER, REWARD_PORT)


def replay_buffer() -> Endpoint:
    """The replay-buffer."""
    return endpoint(Task.REPLAY_BUFFER, REPLAY_PORT)


def mapped_addresses() -> dict[str, str]:
    """What JOBGROUP_ENDPOINTS says: ``host:port`` by ``{task}-{rank}:{port}``; empty outside a local run."""
    text = os.environ.get(ENDPOINTS_VARIABLE)
    return dict(_parse_mapping(text)) if text else {}


def _mapped(task: Task, port: int, rank: int) -> Endpoint | None:
    text = os.environ.get(ENDPOINTS_VARIABLE)
    if not text:
        return None
    key = f"{task.value}-{rank}:{port}"
    address = _parse_mapping(text).get(key)
    if address is None:
        raise ConfigurationError(
            f"{ENDPOINTS_VARIABLE} has no entry {key!r}; give it as 'host:port' or unset the variable"
        )
    host, _, number = address.rpartition(":")
    if not host or not number.isdecimal():
        raise ConfigurationError(f"{ENDPOINTS_VARIABLE}[{key!r}] is {address!r}; allowed is 'host:port'")
    return Endpoint(host, int(number))


@lru_cache(maxsize=8)
def _parse_mapping(text: str) -> dict[str, str]:
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f'{ENDPOINTS_VARIABLE} is not JSON ({error}); allowed is {{"task-rank:port": "host:port"}}'
        ) from error
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise ConfigurationError(f"{ENDPOINTS_VARIABLE} must be a JSON object of strings")
    return mapping


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigurationError(f"{name} is {text!r}; allowed is a whole number")
    return int(text)
