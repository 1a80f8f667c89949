"""The components of a job group: single questions to them, for a terminal, and their monitor, for the run page.

The monitor runs only while somebody looks: a request for the components keeps it awake for a while. It sends each
request once, with a short timeout, so that a component that hangs shows as silent and delays nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from services.clients.environment import find_servers
from services.core import endpoints
from services.core.endpoints import Task
from services.core.errors import DependencyLostError
from services.http.client import HttpClient, problem_detail

POLL_SECONDS = 2.0
REQUEST_SECONDS = 2.0
QUESTION_SECONDS = 3.0
AWAKE_SECONDS = 15.0

MANY_NODES = (Task.GATEWAY, Task.ENVIRONMENT_SERVER)
"""The services that may have any number of nodes, which appear once they are found."""
SERVICES = (Task.DATA_SERVER, Task.REWARD_SERVER, Task.REPLAY_BUFFER, Task.ROLLOUT_SERVER)

UP, BUSY, SILENT = "up", "busy", "silent"

Json = dict[str, Any]
Read = Callable[["Component"], Awaitable[None]]


def questioner(token: str | None = None) -> httpx.AsyncClient:
    """Return a client of a run's components with a connection for each request, because components may restart."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=QUESTION_SECONDS, limits=limits, trust_env=False, headers=headers)


async def ask_state(http: httpx.AsyncClient, address: str) -> str:
    """Return UP, or the status that a component's /health gives if it answers another code than 200.

    A component that listens and does not answer in QUESTION_SECONDS is BUSY, as the trainer may be during a step. A
    component that cannot be reached is SILENT.
    """
    try:
        response = await http.get(f"http://{address}/health")
    except httpx.ReadTimeout:
        return BUSY
    except httpx.TransportError:
        return SILENT
    return UP if response.status_code == httpx.codes.OK else health_of(response)[0]


async def ask_trainer(http: httpx.AsyncClient, address: str) -> Json | None:
    """Return the trainer's /stats: phase, total_steps, activity; None while the trainer does not answer."""
    try:
        stats: Json = (await http.get(f"http://{address}/stats")).raise_for_status().json()
    except httpx.HTTPError:
        return None
    return stats


@dataclass
class Component:
    """A component as last seen. ``state`` is the status of its /health, ``silent``, or ``asking`` at first."""

    name: str
    url: str
    state: str = "asking"
    detail: str | None = None
    policy_version: int | None = None
    figures: Json = field(default_factory=dict)
    """The component's own figures: queue lengths, counts."""
    answered: float | None = None
    """The time of the last answer, by time.monotonic."""

    def shown(self) -> Json:
        """Return the component as the page shows it."""
        content = asdict(self)
        answered = content.pop("answered")
        return {**content, "seconds_since_answer": None if answered is None else time.monotonic() - answered}


class ComponentMonitor:
    """A monitor of this job group's components. Run ``run`` beside the service that shows them."""

    def __init__(self, token: str | None, services: Sequence[Task] = SERVICES) -> None:
        self._token = token
        self._awake_until = 0.0
        self._wake = asyncio.Event()
        self._stack = AsyncExitStack()
        self._clients: dict[str, HttpClient] = {}
        alone = [task for task in services if task not in (*MANY_NODES, Task.ROLLOUT_SERVER)]
        self._services = [Component(task.value, endpoints.endpoint(task).url) for task in alone]
        self._nodes: dict[Task, list[Component]] = {task: [] for task in MANY_NODES if task in services}
        routers = [task for task in services if task is Task.ROLLOUT_SERVER]
        self._routers = [Component("router", endpoints.endpoint(task).url) for task in routers]
        self._workers: dict[str, Component] = {}

    def components(self) -> list[Json]:
        """Return all components as last seen; also keep the monitor awake."""
        self._awake_until = time.monotonic() + AWAKE_SECONDS
        self._wake.set()
        return self.last_seen()

    def last_seen(self) -> list[Json]:
        """Return all components as last seen."""
        workers = [self._workers[url] for url in sorted(self._workers)]
        return [c.shown() for c in (*self._services, *self._found, *self._routers, *workers)]

    async def run(self) -> None:
        """Poll the components while somebody looks, until cancelled."""
        async with self._stack:
            while True:
                if time.monotonic() > self._awake_until:
                    self._wake.clear()
                    await self._wake.wait()
                await self._find_nodes()
                await asyncio.gather(
                    *(self._poll(service, self._read_stats) for service in (*self._services, *self._found)),
                    *(self._poll(router, self._read_router) for router in self._routers),
                    *(self._poll(worker, self._read_worker) for worker in self._workers.values()),
                )
                await asyncio.sleep(POLL_SECONDS)

    @property
    def _found(self) -> list[Component]:
        return [component for found in self._nodes.values() for component in found]

    async def _find_nodes(self) -> None:
        """Add the nodes of the tasks of MANY_NODES that have come up."""
        for task, found in self._nodes.items():
            known = {component.name for component in found}
            nodes = await find_servers(known, task)
            found += [Component(name, address.url) for name, address in nodes.items() if name not in known]

    async def _poll(self, component: Component, read: Read) -> None:
        """Update a component's health, and if it is healthy, its figures by ``read``."""
        try:
            response = await self._get(component, "/health")
            component.answered = time.monotonic()
            component.state, component.detail = health_of(response)
            if response.status_code == httpx.codes.OK:
                await read(component)
        except DependencyLostError as error:
            component.state, component.detail = SILENT, str(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # Another program, or another version, listens there.
            component.state, component.detail = "unhealthy", f"answered something else than expected: {error!r}"

    async def _get(self, component: Component, path: str) -> httpx.Response:
        client = self._clients.get(component.url)
        if client is None:
            client = HttpClient(component.url, token=self._token, service=component.name)
            self._clients[component.url] = await self._stack.enter_async_context(client)
        return await client.send_once("GET", path, seconds=REQUEST_SECONDS)

    async def _get_json(self, component: Component, path: str) -> Json:
        """Return the JSON object of a route; ValueError, with the reason, if the component refuses."""
        response = await self._get(component, path)
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{path}: {response.status_code} {problem_detail(response)}")
        content: Json = response.json()
        return content

    async def _read_stats(self, component: Component) -> None:
        component.figures |= _figures(await self._get_json(component, "/stats"))

    async def _read_router(self, router: Component) -> None:
        listed = (await self._get_json(router, "/workers"))["workers"]
        routed = {worker["url"]: bool(worker.get("is_healthy", True)) for worker in listed}
        router.figures["workers routed"] = len(routed)
        router.figures["requests in flight"] = sum(worker.get("load") or 0 for worker in listed)
        for url in routed.keys() - self._workers.keys():
            self._workers[url] = Component(_worker_name(url), url)
        # A worker that left the routing may come back, so the monitor keeps polling it.
        for url, worker in self._workers.items():
            worker.figures["routed"] = "yes" if routed.get(url) else "no"

    async def _read_worker(self, worker: Component) -> None:
        version = str((await self._get_json(worker, "/model_info")).get("weight_version"))
        worker.policy_version = int(version) if version.isdecimal() else None
        # SGLang has the first route, the embedded engine the second.
        loads = await self._get(worker, "/v1/loads?include=core")
        if loads.status_code == httpx.codes.OK:
            ranks = loads.json()["loads"]  # one a data-parallel rank
            worker.figures["running"] = sum(rank["num_running_reqs"] for rank in ranks)
            worker.figures["waiting"] = sum(rank["num_waiting_reqs"] for rank in ranks)
            worker.figures["tokens/s"] = round(sum(rank["gen_throughput"] for rank in ranks), 1)
        else:
            await self._read_stats(worker)


def _worker_name(worker_url: str) -> str:
    """Return the name of a rollout worker: its node's, and the number of an engine that is not the node's first.

    The node is the host's first label, or locally the worker's key in JOBGROUP_ENDPOINTS.
    """
    url = httpx.URL(worker_url)
    node, port = url.host.partition(".")[0], str(url.port)
    if not node.startswith((Task.ROLLOUT_SERVER.value, Task.TRAINER.value)):
        mapped = endpoints.mapped_addresses().items()
        keys = [key for key, address in mapped if worker_url.endswith(f"//{address}")]
        if not keys:
            return "rollout worker"
        node, _, port = keys[0].rpartition(":")
    further = [str(number) for number in endpoints.ENGINE_PORTS[1:]]
    return f"{node} engine {1 + further.index(port)}" if port in further else node


def health_of(response: httpx.Response) -> tuple[str, str | None]:
    """Return state and detail from a reply of /health; SGLang and the router reply with the status code alone."""
    if response.status_code == httpx.codes.OK:
        return "healthy", None
    is_json = response.headers.get("content-type", "").startswith("application/json")
    body = response.json() if is_json and response.content else {}
    status, detail = (body.get("status"), body.get("detail")) if isinstance(body, dict) else (None, None)
    state = status if status in ("starting", "draining", "unhealthy") else "unhealthy"
    return state, str(detail) if detail else f"/health answered {response.status_code}"


def _figures(stats: Json) -> Json:
    """Return the numbers and texts of a reply of /stats and of the objects within it, with words for names."""
    flat: Json = {}
    for name, value in stats.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {name.replace("_", " "): value for name, value in flat.items() if isinstance(value, str | int | float)}
