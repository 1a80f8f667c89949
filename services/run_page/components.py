"""Asks every component of the job group how it is, for the run page.

Only while somebody looks: a page that asks for the components keeps the watch awake for a while. Each question is asked
once, with a short deadline, so that a component which hangs shows as silent and holds up nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.core import endpoints
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import HttpClient, problem_detail

log = get_logger(__name__)

POLL_SECONDS = 2.0
QUESTION_SECONDS = 2.0
AWAKE_SECONDS = 15.0

Answer = dict[str, Any]
Describe = Callable[[Answer], Answer]


@dataclass
class Component:
    """What is known of one component. ``state`` is that of its /health, or ``silent``, or ``asking`` at first."""

    name: str
    url: str
    state: str = "asking"
    detail: str | None = None
    milliseconds: float | None = None
    policy_version: int | None = None
    figures: Answer = field(default_factory=dict)
    """What it says of itself: queue lengths, counts."""
    answered: float | None = None
    """When it last answered, by time.monotonic."""

    def shown(self) -> Answer:
        """As the page gets it."""
        since = None if self.answered is None else time.monotonic() - self.answered
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "detail": self.detail,
            "milliseconds": self.milliseconds,
            "policy_version": self.policy_version,
            "figures": self.figures,
            "seconds_since_answer": since,
        }


class ComponentWatch:
    """Knows the components of this job group. Run ``run`` beside the service that shows them."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._wanted_until = 0.0
        self._wanted = asyncio.Event()
        self._stack = AsyncExitStack()
        self._clients: dict[str, HttpClient] = {}
        self._data = Component("data-server", endpoints.endpoint(endpoints.Task.DATA_SERVER).url)
        self._reward = Component("reward-server", endpoints.endpoint(endpoints.Task.REWARD_SERVER).url)
        self._replay = Component("replay-buffer", endpoints.endpoint(endpoints.Task.REPLAY_BUFFER).url)
        self._router = Component("router", endpoints.endpoint(endpoints.Task.ROLLOUT_SERVER).url)
        self._workers: dict[str, Component] = {}
        self._generated: dict[str, tuple[float, float]] = {}

    def components(self) -> list[Answer]:
        """What was last heard of each; also keeps the watch awake."""
        self._wanted_until = time.monotonic() + AWAKE_SECONDS
        self._wanted.set()
        return self._shown()

    def _shown(self) -> list[Answer]:
        workers = [self._workers[url] for url in sorted(self._workers)]
        return [c.shown() for c in (self._data, self._reward, self._replay, self._router, *workers)]

    async def run(self) -> None:
        """Asks again and again, as long as somebody wants to know, until cancelled."""
        async with self._stack:
            while True:
                if time.monotonic() > self._wanted_until:
                    self._wanted.clear()
                    await self._wanted.wait()
                await self._ask_all()
                await asyncio.sleep(POLL_SECONDS)

    async def _ask_all(self) -> None:
        await asyncio.gather(
            self._ask(self._data, self._stats(_data_figures)),
            self._ask(self._reward, self._stats(_reward_figures)),
            self._ask(self._replay, self._stats(_replay_figures)),
            self._ask(self._router, self._ask_router),
            *(self._ask(worker, self._ask_worker) for worker in self._workers.values()),
        )

    async def _ask(self, component: Component, learn: Callable[[Component], Awaitable[None]]) -> None:
        """Asks for its health, and for more where it answers."""
        started = time.monotonic()
        try:
            response = await self._get(component, "/health")
            component.milliseconds = 1000 * (time.monotonic() - started)
            component.answered = time.monotonic()
            component.state, component.detail = _health(response)
            if response.status_code == httpx.codes.OK:
                await learn(component)
        except DependencyLostError as error:
            component.state, component.detail = "silent", str(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # Another program, or another version, listens there.
            component.state, component.detail = "unhealthy", f"answered something else than expected: {error!r}"

    async def _get(self, component: Component, path: str) -> httpx.Response:
        client = self._clients.get(component.url)
        if client is None:
            client = HttpClient(component.url, token=self._token, service=component.name)
            self._clients[component.url] = await self._stack.enter_async_context(client)
        return await client.send_once("GET", path, seconds=QUESTION_SECONDS)

    def _stats(self, describe: Describe) -> Callable[[Component], Awaitable[None]]:
        async def learn(component: Component) -> None:
            response = await self._get(component, "/stats")
            if response.status_code == httpx.codes.OK:
                component.figures = describe(response.json())
            else:
                component.detail = f"/stats: {response.status_code} {problem_detail(response)}"

        return learn

    async def _ask_router(self, router: Component) -> None:
        response = await self._get(router, "/workers")
        if response.status_code != httpx.codes.OK:
            router.detail = f"/workers: {response.status_code} {problem_detail(response)}"
            return
        listed = response.json()["workers"]
        routed = {worker["url"]: bool(worker.get("is_healthy", True)) for worker in listed}
        router.figures = {
            "workers routed": len(routed),
            "requests in flight": sum(worker.get("load") or 0 for worker in listed),
        }
        for url in routed.keys() - self._workers.keys():
            self._workers[url] = Component(_node_name(url), url)
        # One that left the routing may come back, and is watched on.
        for url, worker in self._workers.items():
            worker.figures = worker.figures | {"routed": "yes" if routed.get(url) else "no"}

    async def _ask_worker(self, worker: Component) -> None:
        information = await self._get(worker, "/model_info")
        if information.status_code == httpx.codes.OK:
            version = str(information.json().get("weight_version"))
            worker.policy_version = int(version) if version.isdecimal() else None
        loads = await self._get(worker, "/v1/loads?include=core")
        if loads.status_code == httpx.codes.OK:
            worker.figures = worker.figures | _load_figures(loads.json()["loads"])
            return
        stats = await self._get(worker, "/stats")
        if stats.status_code == httpx.codes.OK:
            worker.figures = worker.figures | self._engine_figures(worker.url, stats.json())

    def _engine_figures(self, url: str, stats: Answer) -> Answer:
        now, generated = time.monotonic(), float(stats["generated_tokens"])
        before, generated_before = self._generated.get(url, (now, generated))
        self._generated[url] = (now, generated)
        # A restarted engine counts from zero again.
        rate = max(0.0, generated - generated_before) / (now - before) if now > before else None
        figures = {"running": stats["running"], "waiting": stats["waiting"]}
        return figures if rate is None else figures | {"tokens/s": round(rate, 1)}


def _node_name(worker_url: str) -> str:
    """The node that a rollout worker is on: in a job group the first label of its name, locally found by address."""
    node = httpx.URL(worker_url).host.partition(".")[0]
    if node.startswith(endpoints.Task.ROLLOUT_SERVER.value):
        return node
    for key, address in endpoints.mapped_addresses().items():
        if worker_url.endswith(f"//{address}"):
            return key.rpartition(":")[0]
    return "rollout worker"


def _health(response: httpx.Response) -> tuple[str, str | None]:
    """State and reason from an answer of /health; SGLang and the router say it by the status alone."""
    is_json = response.headers.get("content-type", "").startswith("application/json")
    body = response.json() if is_json and response.content else {}
    said = body.get("status") if isinstance(body, dict) else None
    if response.status_code == httpx.codes.OK:
        return "healthy", None
    state = said if said in ("starting", "draining", "unhealthy") else "unhealthy"
    detail = body.get("detail") if isinstance(body, dict) else None
    return state, str(detail) if detail else f"/health answered {response.status_code}"


def _data_figures(stats: Answer) -> Answer:
    return {
        "source": stats.get("source"),
        "training prompts": stats.get("train_prompts"),
        "held-out prompts": stats.get("test_prompts"),
    }


def _reward_figures(stats: Answer) -> Answer:
    answers = stats.get("answers", {})
    return {
        "waiting": stats.get("pending"),
        "workers": stats.get("workers_alive"),
        "scored": answers.get("scored", 0),
        "not scorable": sum(count for status, count in answers.items() if status != "scored"),
    }


def _replay_figures(stats: Answer) -> Answer:
    return {
        "waiting": stats.get("waiting"),
        "leased": stats.get("leased"),
        "groups": stats.get("groups"),
        "capacity": stats.get("capacity"),
        "newest policy version": stats.get("newest_policy_version"),
        "disk MB": round(stats.get("disk_bytes", 0) / 1e6, 1),
    }


def _load_figures(loads: list[Answer]) -> Answer:
    """SGLang's loads, one a data-parallel rank."""
    return {
        "running": sum(load["num_running_reqs"] for load in loads),
        "waiting": sum(load["num_waiting_reqs"] for load in loads),
        "tokens/s": round(sum(load["gen_throughput"] for load in loads), 1),
    }
