"""The tests of this folder need hosts of their own. Two runs that nothing happens to are shared by several of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.local.supervisor import Outcome
from services.endpoints import ENGINE_PORT
from tests.cluster import network
from tests.cluster.cluster import Answer, Cluster
from tests.e2e.system import SETTINGS

STEPS = 12
BATCH = 8
# Deterministic, so that a run that was disturbed can be compared with one that was not.
RUN = SETTINGS | {
    "MAX_STEPS": str(STEPS),
    "BATCH_SIZE": str(BATCH),
    "LOGGED_GROUPS": str(BATCH),
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "3",
    "ENGINE_DETERMINISTIC": "true",
}
WORKERS = [f"http://rollout-server-{rank}.grpo:{ENGINE_PORT}" for rank in range(2)]


@pytest.fixture(autouse=True, scope="session")
def hosts() -> None:
    """Skips where this machine cannot have several hosts."""
    if reason := network.why_not():
        pytest.skip(f"several hosts on one machine: {reason}")


@dataclass
class Finished:
    """A run that went to its end, and what was seen of it on the way."""

    cluster: Cluster
    outcome: Outcome
    served: list[Answer | None] = field(default_factory=list)
    """What each worker said of its model after the first step."""
    connections: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """Local and remote address of each TCP connection, by node."""
    names: dict[str, str] = field(default_factory=dict)
    """Address by node, as another node resolves its name."""
    left: list[psutil.Process] = field(default_factory=list)
    """What still ran when the run had ended."""

    def metrics(self) -> list[dict[str, Any]]:
        return self.cluster.metrics()

    @property
    def model(self) -> Path:
        return self.cluster.run_dir / "model" / "model.safetensors"


def finish(directory: Path, model: Path, **settings: str) -> Finished:
    """A run, watched from outside."""
    with Cluster(directory, model, RUN | settings) as cluster:
        cluster.wait_for_step(1)
        served = [cluster.ask(f"{worker}/model_info") for worker in WORKERS]
        connections = {node: _connections(cluster.on_node(node, "ss", "-Htn")) for node in cluster.nodes()}
        resolved = cluster.on_node("ppo-trainer-0", "getent", "hosts", *(f"{node}.grpo" for node in cluster.nodes()))
        names = {line.split()[1].removesuffix(".grpo"): line.split()[0] for line in resolved.splitlines()}
        outcome = cluster.wait()
        return Finished(cluster, outcome, served, connections, names, cluster.processes())


def _connections(listed: str) -> set[tuple[str, str]]:
    """The two ends of each connection, without ports, of what ``ss`` lists."""
    ends = [re.findall(r"(?:::ffff:)?([0-9.]+|[0-9a-f:]+)\]?:\d+", line) for line in listed.splitlines()]
    return {(found[0], found[1]) for found in ends if len(found) == 2}


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that published through the volume."""
    return finish(tmp_path_factory.mktemp("undisturbed"), tiny_model)


@pytest.fixture(scope="session")
def by_broadcast(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that published by broadcast."""
    return finish(tmp_path_factory.mktemp("broadcast"), tiny_model, PUBLISH_TRANSPORT="broadcast")
