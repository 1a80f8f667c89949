"""The tests of this folder need hosts of their own. They share a run that nothing happens to but questions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from local_runner.supervisor import Outcome
from services.core.endpoints import ROUTER_INNER_PORT
from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.strangers import TOKEN, Strangers
from tests.e2e.system import SETTINGS

STEPS = 16
BATCH = 8
# Deterministic, so that a run that was disturbed can be compared with one that was not.
RUN = SETTINGS | {
    "MAX_STEPS": str(STEPS),
    "BATCH_SIZE": str(BATCH),
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "2",
    "ENGINE_DETERMINISTIC": "true",
}


@pytest.fixture(autouse=True, scope="session")
def hosts() -> None:
    """Skips where this machine cannot have several hosts."""
    if reason := network.why_not():
        pytest.skip(f"several hosts on one machine: {reason}")


@dataclass
class Finished:
    """A run that went to its end, and what was seen of it on the way."""

    cluster: Cluster
    listening: dict[str, set[int]]
    """Ports on which others can reach a node, by node."""
    connections: dict[str, set[tuple[str, str]]]
    """Local and remote address of each TCP connection, by node, but for those of a proxy to the router behind it."""
    names: dict[str, str]
    """Address by node, as another node resolves its name."""
    outcome: Outcome | None = None
    left: list[psutil.Process] = field(default_factory=list)
    """What still ran when the run had ended."""


def finish(cluster: Cluster, strangers: Strangers) -> Finished:
    """A run, watched from outside while it stands still after the first step."""
    cluster.wait_for_step(1)
    with cluster.held():
        names = [f"{node}.grpo" for node in cluster.nodes()]
        resolved = cluster.on_node("ppo-trainer-0", "getent", "hosts", *names).splitlines()
        seen = Finished(
            cluster,
            listening={node: _ports(cluster.on_node(node, "ss", "-Hltn")) for node in cluster.nodes()},
            connections={node: _connections(cluster.on_node(node, "ss", "-Htn")) for node in cluster.nodes()},
            names={line.split()[1].removesuffix(".grpo"): line.split()[0] for line in resolved},
        )
        strangers.try_everything(cluster)
    seen.outcome = cluster.wait()
    seen.left = cluster.processes()
    return seen


_END = re.compile(r"\[?(?:::ffff:)?(\*|[0-9a-f.:]+?)\]?(?:%\w+)?:(\d+|\*)(?=\s|$)")


def _connections(listed: str) -> set[tuple[str, str]]:
    """The two ends of each connection, without ports, of what ``ss`` lists; a proxy's to its router is left out."""
    ends = [_END.findall(line) for line in listed.splitlines()]
    inner = str(ROUTER_INNER_PORT)
    return {(near, far) for (near, near_port), (far, far_port) in ends if inner not in (near_port, far_port)}


def _ports(listed: str) -> set[int]:
    """The ports of ``ss``'s list on which others than the node itself are listened to."""
    ends = [_END.findall(line)[0] for line in listed.splitlines()]
    return {int(port) for address, port in ends if not address.startswith("127.") and address != "::1"}


@pytest.fixture(scope="session")
def strangers() -> Strangers:
    """What a stranger and a friend were answered by the guarded run."""
    return Strangers()


@pytest.fixture(scope="session")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, strangers: Strangers) -> Finished:
    """A run with a token that publishes by broadcast."""
    settings = RUN | {"PUBLISH_TRANSPORT": "broadcast"}
    secrets = {"JOBGROUP_TOKEN": TOKEN}
    with Cluster(tmp_path_factory.mktemp("guarded"), tiny_model, settings, secrets=secrets) as cluster:
        return finish(cluster, strangers)
