"""Task names, ports and addresses: where each component listens, and where the others reach it.

Under SkyPilot, every node of the job group reaches node r of a task as ``{task}-{r}.{group}``, on the task's usual
port. The local runner gives every node its own address instead and lists them in ``JOBGROUP_ENDPOINTS``, a JSON object
from ``{task}-{rank}:{port}`` to ``host:port``. Every component asks this module before it connects or listens, so that
nothing else differs between a laptop and a cluster. The module resolves no names: each new connection resolves them
again, because a recovered node has a new address.

It also decides which requests go through a proxy of the environment: none within the job group, whichever program sends
them, and all others as HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY say.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from services.core.errors import ConfigurationError
from services.core.machine import NODE_RANK_VARIABLE, whole_number


class Task(StrEnum):
    """The tasks of the job group, by their names in jobgroup.yaml, and the two services of the evaluation system."""

    DATA_SERVER = "data-server"
    ROLLOUT_SERVER = "rollout-server"
    REWARD_SERVER = "reward-server"
    REPLAY_BUFFER = "replay-buffer"
    TRAINER = "ppo-trainer"
    COLLECTOR = "collector"
    GATEWAY = "gateway"
    EVALUATION_HEAD = "evaluation-head"
    ENVIRONMENT_SERVER = "environment-server"


GPUS_OF_A_NODE = 8
"""The most GPUs that a node on a cluster has."""

DATA_PORT = 8000
ROUTER_PORT = 30000
ENGINE_PORT = 30001
"""The port of a rollout node's first engine."""
ENGINE_PORTS = tuple(ENGINE_PORT + 10 * engine for engine in range(GPUS_OF_A_NODE))
"""The ports of a rollout node's engines, of which there are at most as many as GPUs."""
ROUTER_METRICS_PORT = 29000
ROUTER_INNER_PORT = 30002
"""The router's port on its own node, when JOBGROUP_TOKEN is set and the authenticating proxy has ROUTER_PORT."""
REWARD_PORT = 8002
REPLAY_PORT = 8003
STATUS_PORT = 8004
GATEWAY_PORT = 8005
TRAINER_RENDEZVOUS_PORT = 29500
WEIGHTS_BROADCAST_PORT = 29600
EVALUATION_HEAD_PORT = 8080
ENVIRONMENT_PORT = 8081

PORTS: dict[Task, tuple[int, ...]] = {
    Task.DATA_SERVER: (DATA_PORT,),
    Task.ROLLOUT_SERVER: (ROUTER_PORT, ROUTER_METRICS_PORT, ROUTER_INNER_PORT, *ENGINE_PORTS),
    Task.REWARD_SERVER: (REWARD_PORT,),
    Task.REPLAY_BUFFER: (REPLAY_PORT,),
    Task.TRAINER: (STATUS_PORT, TRAINER_RENDEZVOUS_PORT, WEIGHTS_BROADCAST_PORT),
    Task.COLLECTOR: (),
    Task.GATEWAY: (GATEWAY_PORT,),
    Task.EVALUATION_HEAD: (EVALUATION_HEAD_PORT,),
    Task.ENVIRONMENT_SERVER: (ENVIRONMENT_PORT,),
}
"""The ports of each task, its main port first."""

ENDPOINTS_VARIABLE = "JOBGROUP_ENDPOINTS"
APART_VARIABLE = "JOBGROUP_TIERS_APART"
"""Set by the local runner to ``true`` where engines and trainer have different GPUs."""
ENVIRONMENT_SERVERS_VARIABLE = "JOBGROUP_ENVIRONMENT_SERVERS"
"""The number of tasks with environment-servers, each for an image of its own; all but the first end with a number."""
TASK_VARIABLE = "JOBGROUP_TASK"
"""Set by the local runner to the name of a node's task."""
COLOCATE_VARIABLE = "COLOCATE"
EVERYWHERE = ("0.0.0.0", "::")
"""The address of all interfaces, with IPv4 and without."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")
NO_PROXY_VARIABLES = ("NO_PROXY", "no_proxy")
"""The hosts that HTTP clients ask directly although one of PROXY_VARIABLES is set."""
PROXY_VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

_ADDRESSES = TypeAdapter(dict[str, Annotated[str, Field(pattern=r"^.+:\d+$")]])


@dataclass(frozen=True)
class Endpoint:
    """A host (name or address) and a port."""

    host: str
    port: int

    @property
    def url_host(self) -> str:
        """The host as URLs have it: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return f"http://{self.url_host}:{self.port}"


def is_colocated(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of a task say that engines run on the trainer's nodes (COLOCATE)."""
    return environment.get(COLOCATE_VARIABLE, "").strip().lower() in ("1", "t", "true", "y", "yes", "on")


def hosting_task(task: Task) -> Task:
    """Return the task on whose nodes a component runs: with COLOCATE the engines and their router are the trainer's."""
    return Task.TRAINER if task is Task.ROLLOUT_SERVER and is_colocated(os.environ) else task


def task_names(task: Task) -> list[str]:
    """Return the names of the tasks that have a component: one, unless images have environment-servers of their own."""
    count = whole_number(ENVIRONMENT_SERVERS_VARIABLE) if task is Task.ENVIRONMENT_SERVER else None
    return [task.value, *(f"{task.value}-{number}" for number in range(2, (count or 1) + 1))]


def component_of(task: str) -> str:
    """Return the component of a task by its name, such as ``environment-server`` of ``environment-server-2``."""
    return re.sub(rf"^({Task.ENVIRONMENT_SERVER.value})-\d+$", r"\1", task)


def endpoint(task: Task, port: int | None = None, rank: int = 0, name: str = "") -> Endpoint:
    """Return where every node of the job group reaches ``port`` (default: the main one) of node ``rank`` of ``task``.

    ``name`` is one of ``task_names``, the first by default. Outside a job group (no SKYPILOT_JOBGROUP_NAME) that is
    this machine. A task that the job group lacks gets a name that does not resolve, locally as under SkyPilot.

    Raises:
        ConfigurationError: JOBGROUP_ENDPOINTS is malformed, or lacks the node of a task of which it has others.
    """
    port, name = PORTS[task][0] if port is None else port, name or hosting_task(task).value
    mapping, group = mapped_addresses(), os.environ.get("SKYPILOT_JOBGROUP_NAME")
    if any(key.startswith(f"{name}-") for key in mapping):
        return _mapped(name, port, rank)
    if mapping:
        group = group or "invalid"
    return Endpoint(f"{name}-{rank}.{group}" if group else "127.0.0.1", port)


def bind_address(task: Task, port: int | None = None) -> Endpoint:
    """Return where this node of ``task`` listens for ``port`` (default: the main one).

    A node under SkyPilot listens on every interface, because the other nodes must reach it; elsewhere a component
    listens on 127.0.0.1 alone.
    """
    port = PORTS[task][0] if port is None else port
    if mapped_addresses():
        return _mapped(os.environ.get(TASK_VARIABLE) or hosting_task(task).value, port, node_rank())
    everywhere = EVERYWHERE[all(":" in address for address in node_addresses())]
    return Endpoint(everywhere if NODE_RANK_VARIABLE in os.environ else "127.0.0.1", port)


def reached_at(bind: Endpoint, usual: Endpoint) -> Endpoint:
    """Return where others reach a listener on ``bind``: if it is every interface, at the host of ``usual``."""
    return Endpoint(usual.host, bind.port) if bind.host in EVERYWHERE else bind


def proxy_of(url: str) -> str | None:
    """Return the proxy of the environment through which to send a request to ``url``; None: directly."""
    parts = urlsplit(url)
    names = (f"{parts.scheme}_proxy", "all_proxy")
    proxy = next(filter(None, (os.environ.get(form) for name in names for form in (name, name.upper()))), None)
    authority = parts.netloc.rpartition("@")[2].lower()
    exempt = exempt_from_proxies()[NO_PROXY_VARIABLES[0]].lower().split(",") if proxy else ()
    if proxy is None or any(_covers(entry, parts.hostname or "", authority) for entry in exempt):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _covers(entry: str, host: str, authority: str) -> bool:
    """Return whether an entry of NO_PROXY covers a host: a network, an address, a name with all below it, or ``*``."""
    with contextlib.suppress(ValueError):
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    name = entry.removeprefix("*").lstrip(".")
    return entry in ("*", authority) or host == name or host.endswith(f".{name}")


def exempt_from_proxies(*hosts: str) -> dict[str, str]:
    """Return the variables with which a process sends requests to the job group and ``hosts`` directly.

    They also have the hosts that the user exempts. Addresses are listed one by one, because urllib, httpx
    and old versions of curl know no networks.
    """
    # Some programs read the one variable, some the other.
    listed = [host for name in NO_PROXY_VARIABLES for host in os.environ.get(name, "").split(",")]
    mapped = [address.rpartition(":")[0].strip("[]") for address in mapped_addresses().values()]
    group = os.environ.get("SKYPILOT_JOBGROUP_NAME")
    own = (*LOOPBACK, *node_addresses(), *mapped, f".{group}" if group else "")
    exempt = dict.fromkeys(host.strip() for host in (*listed, *own, *hosts) if host.strip())
    return dict.fromkeys(NO_PROXY_VARIABLES, "*" if "*" in exempt else ",".join(exempt))


def ask_directly(*hosts: str) -> None:
    """Have every HTTP client of this process and its children reach the job group and ``hosts`` without a proxy."""
    os.environ.update(exempt_from_proxies(*hosts))


def is_own_address(host: str) -> bool:
    """Return whether a name or an address is this machine's, or this pod's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind((found[0][4][0], 0))  # refused for addresses of others
    except OSError:
        return False
    return True


def node_rank() -> int:
    """Return this node's rank within its task."""
    return whole_number(NODE_RANK_VARIABLE) or 0


def num_nodes() -> int:
    """Return the number of nodes of this node's task."""
    return whole_number("SKYPILOT_NUM_NODES") or 1


def node_addresses() -> list[str]:
    """Return the addresses of the nodes of this node's task, by rank."""
    return os.environ.get("SKYPILOT_NODE_IPS", "127.0.0.1").split()


def mapped_addresses() -> dict[str, str]:
    """Return the content of JOBGROUP_ENDPOINTS: ``host:port`` by ``{task}-{rank}:{port}``; empty if it is not set."""
    text = os.environ.get(ENDPOINTS_VARIABLE)
    return dict(_parse_mapping(text)) if text else {}


def tiers_are_apart() -> bool:
    """Return whether engines and trainer have GPUs or nodes of their own, as tasks of a job group have on a cluster."""
    told = os.environ.get(APART_VARIABLE)
    if told is not None or mapped_addresses():
        return told == "true"
    return bool(os.environ.get("SKYPILOT_JOBGROUP_NAME"))


def _mapped(task: str, port: int, rank: int) -> Endpoint:
    key = f"{task}-{rank}:{port}"
    if (address := mapped_addresses().get(key)) is None:
        raise ConfigurationError(f"{ENDPOINTS_VARIABLE} lacks {key!r}; give its 'host:port', or unset the variable")
    host, _, number = address.rpartition(":")
    return Endpoint(host.strip("[]"), int(number))


@lru_cache(maxsize=8)
def _parse_mapping(text: str) -> dict[str, str]:
    try:
        return _ADDRESSES.validate_json(text)
    except ValidationError as error:
        raise ConfigurationError(
            f'{ENDPOINTS_VARIABLE} is {text!r}; allowed is a JSON object such as {{"task-rank:port": "host:port"}}'
        ) from error
