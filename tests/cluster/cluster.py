"""jobgroup.yaml on several hosts, as SkyPilot runs it on Kubernetes: names that resolve, volumes, recoveries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from local_runner import processes, spec
from local_runner.nodes import Addresses, LocalRun
from local_runner.spec import TaskSpec
from local_runner.supervisor import Outcome, State, Supervisor
from services.core.endpoints import Task
from services.core.files import read_records
from services.core.machine import CORES_VARIABLE
from tests.cluster.network import Network
from tests.tolerance import TYPE_VARIABLES, type_in_force
from tests.waiting import IDLE_SECONDS, T, bytes_in, wait_until

ROOT = Path(__file__).parents[2]
NODE = Path(__file__).with_name("node.sh")
JOB = 7
STARTED = datetime(2026, 1, 1, tzinfo=UTC)
"""When SkyPilot's jobs controller took up the job."""
OUTSIDER = "outsider"
"""A host of the network that is no node of the job group."""
REFRESH_SECONDS = 2.0
"""SkyPilot writes the hosts files anew every five; with less the tests take less."""
BURST_SECONDS = 0.05

# What the outsider runs: requests, whose answers it prints as JSON.
_ASK = """
import concurrent.futures, json, sys, urllib.error, urllib.request
def ask(request):
    method, url, headers, body, seconds = request
    request = urllib.request.Request(url, body.encode("latin-1") if body else None, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=seconds)
    except urllib.error.HTTPError as error:
        answer = error
    except OSError:
        return None
    try:
        return [answer.status, dict(answer.headers), answer.read().decode(errors="replace")]
    except OSError:
        return None
with concurrent.futures.ThreadPoolExecutor(8) as threads:
    print(json.dumps(list(threads.map(ask, json.load(sys.stdin)))))
"""


@dataclass(frozen=True)
class Question:
    """A request. ``url`` has names that are resolved as on the nodes, such as ``http://data-server-0.grpo:8000``."""

    url: str
    method: str = "GET"
    token: str | None = None
    body: bytes = b""
    content_type: str = "application/json"

    @property
    def headers(self) -> dict[str, str]:
        token = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return {"Content-Type": self.content_type, **token}


class Answer(NamedTuple):
    """What a route answered."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Cluster:
    """One launch of jobgroup.yaml. A context manager, after which no process or network namespace is left.

    The local runner's supervisor has the part of SkyPilot's controller. A node that is started again, for whatever
    reason, gets another address and a fresh disk.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        settings: Mapping[str, str],
        *,
        secrets: Mapping[str, str] | None = None,
        num_nodes: Mapping[str, int] | None = None,
        job_group: str = "jobgroup.yaml",
    ) -> None:
        """Makes a cluster that runs nothing yet.

        Args:
            directory: becomes the shared volume, in ``volume``, with what else a launch needs.
            model: MODEL_NAME, a directory.
            settings: as with ``sky jobs launch --env``.
            secrets: as with ``--secret``.
            num_nodes: by task, where other than in the job group.
            job_group: the file of the job group.
        """
        # The nodes share this machine's few cores.
        environment = {"MODEL_NAME": str(model), CORES_VARIABLE: "1", "HF_HUB_OFFLINE": "1"}
        environment |= {name: type_in_force(name) for name in TYPE_VARIABLES} | dict(settings)
        self.group = spec.load(
            ROOT / job_group, spec.Overrides(environment, dict(secrets or {}), dict(num_nodes or {}))
        )
        self.volume = directory / "volume"
        self.volume.mkdir(parents=True, exist_ok=True)
        self._roots = directory / "roots"
        self._roots.mkdir(exist_ok=True)
        # What SkyPilot does with `workdir: .`: taken once, at launch, also for the nodes of a recovery.
        self._workdir = directory / "workdir"
        for package in ("services", "trainer"):
            shutil.copytree(ROOT / package, self._workdir / package)
        self._kept = [str(ROOT), sys.prefix, sys.base_prefix, str(model)]
        self._network = Network()
        self._stop_refreshing = threading.Event()
        hosts = {
            task.name: [self._host(task.name, rank) for rank in range(task.num_nodes)] for task in self.group.tasks
        }
        self._run = LocalRun(
            group=self.group,
            run_id=f"{self.group.name}-{JOB}-{STARTED:%Y%m%d-%H%M%S}",
            shared_dir=self.volume,
            addresses=Addresses(hosts, {}),
            mark=f"cluster-{uuid.uuid4().hex}",
        )
        self.events: list[tuple[float, str, int | None, State, str]] = []
        """Monotonic time, task, rank (None: the whole task), state, reason."""
        self._ended: Future[Outcome] = Future()
        self._loop = asyncio.new_event_loop()
        self._supervisor = self._loop.run_until_complete(self._make_supervisor())
        self._threads = [threading.Thread(target=target) for target in (self._supervise, self._refresh_names)]

    def __enter__(self) -> Cluster:
        self._network.__enter__()
        try:
            self._network.add(OUTSIDER, {})
            # SkyPilot starts no `run` before the first nodes of all tasks have an address.
            for task in self.group.tasks:
                for rank in range(task.num_nodes):
                    self._network.add(self._host(task.name, rank), {})
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._network.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for _ in range(2):  # the second time it waits for nothing
                if not self._ended.done():
                    self._loop.call_soon_threadsafe(self._supervisor.stop, 15)
            self._stop_refreshing.set()
            for thread in self._threads:
                thread.join(IDLE_SECONDS)
            processes.end([self._run.mark], 0)
        finally:
            self._network.__exit__()

    # What a test asks

    @property
    def run_dir(self) -> Path:
        return self._run.run_dir

    def address(self, node: str) -> str:
        """A node's present address."""
        return self._network.hosts[node].address

    def log(self, node: str) -> str:
        path = self.run_dir / "logs" / f"{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl."""
        return read_records(self.run_dir / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def restarts(self) -> Counter[str]:
        """How often each task was restarted."""
        return Counter(task for _, task, _, state, _ in self.events if state is State.RESTARTING)

    def nodes(self) -> list[str]:
        """The nodes of all tasks."""
        return [self._host(task.name, rank) for task in self.group.tasks for rank in range(task.num_nodes)]

    def on_node(self, node: str, *command: str) -> str:
        """What a command prints that runs in a node's network."""
        return self._network.run(node, *command).stdout

    def processes(self) -> list[psutil.Process]:
        """The processes that there are on any node."""
        return processes.marked(self._run.mark)

    def ask(self, *questions: Question) -> list[Answer | None]:
        """Sends requests from a host outside the job group; None where there is no answer."""
        requests = [[q.method, q.url, q.headers, q.body.decode("latin-1"), IDLE_SECONDS] for q in questions]
        command = [sys.executable, "-I", "-S", "-c", _ASK]
        seconds = IDLE_SECONDS * (1 + len(requests) / 8)
        done = self._network.run(OUTSIDER, *command, said=json.dumps(requests), seconds=seconds)
        assert done.returncode == 0, done.stderr
        return [None if answer is None else Answer(*answer) for answer in json.loads(done.stdout)]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The trainer waits within it, for one of its nodes, while everything goes on answering."""
        mark = f"{self._run.mark}/{Task.TRAINER.value}-1"
        for process in processes.marked(mark):
            process.suspend()
        try:
            yield
        finally:
            for process in processes.marked(mark):
                process.resume()

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """Waits until ``condition`` returns something true, and returns it. The run must not end meanwhile."""

        def holds() -> T:
            found = condition()
            assert found or not self._ended.done(), f"the run ended before {what}\n{self.told()}"
            return found

        return wait_until(holds, what, progress=self._written, told=self.told)

    def wait_for_step(self, step: int) -> None:
        """Waits until the trainer has completed ``step``."""
        self.wait_until(lambda: any(r["step"] >= step for r in self.metrics()), f"step {step} is done")

    def wait(self) -> Outcome:
        """Waits for the end."""
        wait_until(self._ended.done, "the end of the run", progress=self._written, told=self.told)
        return self._ended.result()

    def _written(self) -> int:
        return bytes_in(self.run_dir)

    def told(self, lines: int = 12) -> str:
        """What happened, and the ends of all logs: for a failed assertion."""
        start = self.events[0][0] if self.events else 0.0
        parts = [f"{at - start:7.1f} {task}-{rank} {state.value}: {why}" for at, task, rank, state, why in self.events]
        for host in self.nodes():
            parts += [f"--- {host}", *self.log(host).splitlines()[-lines:]]
        return "\n".join(parts)

    # What a test does to it

    def destroy(self, *nodes: str) -> None:
        """Takes nodes away as a preemption does: silently, disk included. The controller notices and recovers the task.

        Before it does the trainer runs into the silence: steps are shorter, and every step needs every node.
        """
        for node in nodes:
            self._network.cut(node)
        time.sleep(2)
        for node in nodes:
            task, _, rank = node.rpartition("-")
            processes.end([f"{self._run.mark}/{task}-{rank}"], 0)

    def cut(self, node: str) -> None:
        """Takes a node's link down."""
        self._network.cut(node)

    def mend(self, node: str) -> None:
        """Takes it up again."""
        self._network.mend(node)

    @contextlib.contextmanager
    def losing_packets(self, *nodes: str) -> Iterator[None]:
        """Within it the links of nodes lose a tenth of all packets, in bursts."""
        over = threading.Event()

        def lose() -> None:
            # Not by a queueing discipline such as netem, which kernels may lack.
            while not over.wait(9 * BURST_SECONDS):
                for node in nodes:
                    self._network.cut(node)
                time.sleep(BURST_SECONDS)
                for node in nodes:
                    self._network.mend(node)

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # The controller

    async def _make_supervisor(self) -> Supervisor:
        return Supervisor(self._run, self._on_change, self._start_node)

    def _supervise(self) -> None:
        try:
            self._ended.set_result(self._loop.run_until_complete(self._supervisor.run()))
        except BaseException as error:
            self._ended.set_exception(error)
            raise
        finally:
            self._loop.close()

    def _on_change(self, task: TaskSpec, rank: int | None, state: State, why: str) -> None:
        self.events.append((time.monotonic(), task.name, rank, state, why))

    async def _start_node(self, task: TaskSpec, rank: int, log: IO[bytes]) -> asyncio.subprocess.Process:
        host = self._host(task.name, rank)
        if rank == 0 and self._events_of(host):
            # Recovered: every node of the task is another. The first to start is told the addresses of all.
            await asyncio.to_thread(self._replace_nodes, task)
        self._network.write_names(self._network.hosts[host], self._names())
        root = self._roots / f"{host}-{len(self.events)}"
        root.mkdir()
        return await asyncio.create_subprocess_exec(
            *["ip", "netns", "exec", self._network.hosts[host].namespace, "unshare", "--mount", "--uts"],
            *["sh", str(NODE), str(root), str(self.volume), "1g", host, task.run],
            *self._kept,
            cwd=self._workdir,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(task, rank),
            start_new_session=True,
        )

    def _replace_nodes(self, task: TaskSpec) -> None:
        for rank in range(task.num_nodes):
            self._network.remove(self._host(task.name, rank))
        for rank in range(task.num_nodes):
            self._network.add(self._host(task.name, rank), {})

    def _events_of(self, host: str) -> list[tuple[float, str, int | None, State, str]]:
        """What happened to one node."""
        return [event for event in self.events if f"{event[1]}-{event[2]}" == host]

    def _environment(self, task: TaskSpec, rank: int) -> dict[str, str]:
        """What a node's command finds: nothing of this machine's, what SkyPilot sets, and the task's own."""
        number = [other.name for other in self.group.tasks].index(task.name)
        started = f"{STARTED:%Y-%m-%d-%H-%M-%S-%f}"
        own_nodes = [self._network.hosts[self._host(task.name, r)].address for r in range(task.num_nodes)]
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath, "/usr/sbin:/sbin"]),
            "HOME": "/node",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            **task.environment,
            "SKYPILOT_JOBGROUP_NAME": self.group.name,
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(own_nodes),
            "SKYPILOT_NUM_NODES": str(task.num_nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": f"sky-managed-{started}_{self.group.name}_{task.name}_{JOB}-{number}",
            processes.MARK: self._run.node_mark(task, rank),
        }

    def _refresh_names(self) -> None:
        while not self._stop_refreshing.wait(REFRESH_SECONDS):
            for host in self._network.hosts.values():
                with contextlib.suppress(FileNotFoundError):  # destroyed meanwhile
                    self._network.write_names(host, self._names())

    def _names(self) -> dict[str, str]:
        hosts = self._network.hosts
        return {f"{node}.{self.group.name}": hosts[node].address for node in self.nodes() if node in hosts}

    @staticmethod
    def _host(task: str, rank: int) -> str:
        return f"{task}-{rank}"
