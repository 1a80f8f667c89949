"""Starts rollout nodes as processes, with the embedded engine or the real SGLang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from services.core.endpoints import (
    ENDPOINTS_VARIABLE,
    ENGINE_PORTS,
    ROUTER_INNER_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    Endpoint,
)
from services.engines.engine import Embedded, Engine
from services.weights.policy_store import PolicyStore
from tests.ports import free_ports
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, bytes_in, wait_until

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-of-the-tests"

# Set by whoever installed the real SGLang with tests/sglang_cpu/install.sh.
SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "sglang-python"))
SGLANG_FLAGS = (
    "--device cpu --attention-backend torch_native --disable-overlap-schedule --max-total-tokens 16384 "
    "--max-running-requests 32 --tp-size 1 --sleep-on-idle --log-level warning --lora-backend torch_native"
)


@dataclass
class Node:
    """One launcher and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def children(self, name: str) -> list[psutil.Process]:
        """The launcher's children whose command line has ``name``; a router calls itself sglang::router."""
        if self.process.poll() is not None:
            return []
        return [child for child in psutil.Process(self.process.pid).children() if _is(child, name)]

    @property
    def engine(self) -> psutil.Process:
        return wait_until(lambda: [c for c in self._all() if not _is(c, "router")], "an engine")[0]

    @property
    def router(self) -> psutil.Process:
        return wait_until(lambda: self.children("sglang::router"), "a router")[0]

    def _all(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


@dataclass
class Nodes:
    """The rollout nodes of one job group on this machine."""

    directory: Path
    model: Path
    count: int = 1
    engine: str = "embedded"
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = iter(free_ports((4 + len(ENGINE_PORTS)) * self.count))
        self.endpoints = {
            f"rollout-server-{rank}:{port}": f"127.0.0.1:{next(ports)}"
            for rank in range(self.count)
            for port in (ROUTER_PORT, ROUTER_METRICS_PORT, ROUTER_INNER_PORT, *ENGINE_PORTS)
        }
        self.nodes: dict[int, Node] = {}

    @property
    def router(self) -> Endpoint:
        return self._endpoint(0, ROUTER_PORT)

    def worker(self, rank: int = 0, engine: int = 0) -> Endpoint:
        return self._endpoint(rank, ENGINE_PORTS[engine])

    def admin(self, rank: int = 0) -> Engine:
        """A node's engine, for its tests."""
        engine = Embedded if self.engine == "embedded" else Engine
        return engine(self.worker(rank).url, TOKEN, timeout=IDLE_SECONDS)

    @property
    def store(self) -> PolicyStore:
        return PolicyStore(self.directory / "runs" / "test" / "policy")

    def publish(self, version: int, model: Path | None = None) -> Path:
        """Publishes a copy of a model directory."""
        shutil.copytree(model or self.model, self.store.begin(version), dirs_exist_ok=True)
        return self.store.commit(version)

    def start(self, rank: int = 0) -> Node:
        environment = os.environ | {
            "MODEL_NAME": str(self.model),
            "ROLLOUT_ENGINE": self.engine,
            "SHARED_DIR": str(self.directory),
            "RUN_ID": "test",
            "JOBGROUP_TOKEN": TOKEN,
            "SKYPILOT_JOBGROUP_NAME": "test",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(self.count),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_POD_CPU_CORE_LIMIT": "1",
            "HF_HUB_OFFLINE": "1",
            ENDPOINTS_VARIABLE: json.dumps(self.endpoints),
        }
        if self.engine == "sglang":
            environment |= {"SGLANG_PYTHON": str(SGLANG_PYTHON), "SGLANG_EXTRA_FLAGS": SGLANG_FLAGS}
        log = self.directory / f"node-{rank}-{time.time_ns()}.log"
        command = [sys.executable, "-m", "services.rollout_server"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment | self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.nodes[rank] = Node(process, log)
        return self.nodes[rank]

    def start_all(self) -> Nodes:
        """Starts every node and waits until all workers are registered."""
        for rank in range(self.count):
            self.start(rank)
        self.wait_registered(range(self.count))
        return self

    def wait_registered(self, ranks: Any) -> None:
        """Waits until exactly these workers are in the routing."""
        wanted = sorted(self.worker(rank).url for rank in ranks)

        def registered() -> bool:
            for node in self.nodes.values():
                assert node.process.poll() is None or self.count > 1, node.log.read_text()[-3000:]
            return self.registered() == wanted

        self.wait_until(registered, f"workers {wanted}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits until ``condition`` returns something true, as long as the nodes' logs grow."""
        wait_until(condition, what, progress=lambda: bytes_in(self.directory), told=self.logs)

    def registered(self) -> list[str] | None:
        """URLs of the workers that the router sends to; None when it does not answer."""
        try:
            reply = self.get(self.router, "/workers")
        except httpx.TransportError:
            return None
        if reply.status_code != 200:
            return None
        return sorted(w["url"] for w in reply.json()["workers"] if w["is_healthy"])

    def get(self, endpoint: Endpoint, path: str) -> httpx.Response:
        return httpx.get(endpoint.url + path, headers=authorization(), timeout=IDLE_SECONDS, trust_env=False)

    def post(self, endpoint: Endpoint, path: str, payload: dict[str, Any]) -> httpx.Response:
        return httpx.post(
            endpoint.url + path, json=payload, headers=authorization(), timeout=IDLE_SECONDS, trust_env=False
        )

    def version(self, rank: int = 0) -> str:
        return str(self.get(self.worker(rank), "/model_info").json()["weight_version"])

    def serves(self, version: int, rank: int = 0) -> bool:
        """Whether a node's engine answers and serves a version."""
        try:
            return self.version(rank) == str(version)
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- node {rank}\n{node.log.read_text()[-2000:]}" for rank, node in self.nodes.items())

    def stop(self) -> list[int]:
        """Ends all nodes as a job's end does; returns their exit codes."""
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        return [node.process.wait(LIMIT_SECONDS) for node in self.nodes.values()]

    def _endpoint(self, rank: int, port: int) -> Endpoint:
        host, _, number = self.endpoints[f"rollout-server-{rank}:{port}"].rpartition(":")
        return Endpoint(host, int(number))


def authorization() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


def _is(process: psutil.Process, name: str) -> bool:
    try:
        return name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
