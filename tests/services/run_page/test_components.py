"""Every component shows as it is: healthy, starting, silent, or something else than expected."""

import asyncio
import contextlib
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, Task
from services.core.settings import Settings
from services.http.app import create_service_app
from services.run_page import components
from services.run_page.components import ComponentMonitor
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS, eventually


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://rollout-server-1.group:30001", "rollout-server-1"),
        ("http://rollout-server-1.group:30021", "rollout-server-1 engine 2"),
        ("http://127.0.0.1:4", "rollout-server-0"),
        ("http://127.0.0.1:5", "rollout-server-0 engine 1"),
        ("http://10.0.0.1:30001", "rollout worker"),
    ],
)
def test_each_engine_of_a_node_has_a_name(monkeypatch, url, name):
    listed = {"rollout-server-0:30001": "127.0.0.1:4", "rollout-server-0:30011": "127.0.0.1:5"}
    monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(listed))
    assert components._worker_name(url) == name


@asynccontextmanager
async def nothing_to_load(_):
    yield


@pytest.fixture
def job_group(monkeypatch):
    """A healthy reward-server, a data-server that starts, a replay-buffer that hangs, a router with a worker.

    Gives a function that ends the reward-server.
    """
    data, router, worker = FastAPI(), FastAPI(), FastAPI()

    @data.get("/health")
    def starting():
        return JSONResponse({"status": "starting", "service": "data-server"}, 503)

    @router.get("/health")
    @worker.get("/health")
    def healthy():
        return JSONResponse(None)

    @worker.get("/model_info")
    def information():
        return {"weight_version": "7"}

    @worker.get("/stats")
    def stats():
        return {"running": 3, "waiting": 2, "generated_tokens": int(100 * time.monotonic())}

    hanging = socket.create_server(("127.0.0.1", 0))
    answers = {"pending": 5, "workers_alive": 2, "answers": {"scored": 10, "timeout": 1}}
    reward = create_service_app("reward-server", settings=Settings(), lifespan=nothing_to_load, stats=lambda: answers)
    end_reward = contextlib.ExitStack()
    reward_url = end_reward.enter_context(served(reward))
    with end_reward, served(data) as data_url, served(router) as router_url, served(worker) as worker_url:

        @router.get("/workers")
        def workers():
            return {"workers": [{"id": "a", "url": worker_url, "is_healthy": True, "load": 4}]}

        endpoints = {
            "data-server-0:8000": data_url,
            "reward-server-0:8002": reward_url,
            "replay-buffer-0:8003": f"http://127.0.0.1:{hanging.getsockname()[1]}",
            "rollout-server-0:30000": router_url,
            "rollout-server-0:30001": worker_url,
        }
        mapping = {key: url.removeprefix("http://") for key, url in endpoints.items()}
        monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(mapping))
        monkeypatch.setattr(components, "POLL_SECONDS", 0.05)
        monkeypatch.setattr(components, "REQUEST_SECONDS", 0.5)
        yield end_reward.close
    hanging.close()


async def seen(watch, *, figure="", **wanted):
    """The components by name, once each of ``wanted`` has the state that is given and one of them the figure."""
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            now = {component["name"]: component for component in watch.components()}
            have_states = all(now.get(name, {}).get("state") == state for name, state in wanted.items())
            if have_states and (not figure or any(figure in now[name]["figures"] for name in wanted)):
                return now
            await asyncio.sleep(0.05)


async def test_each_component_shows_as_it_is(job_group):
    watch = ComponentMonitor(token=None)
    watching = asyncio.create_task(watch.run())
    wanted = {"data-server": "starting", "reward-server": "healthy", "replay-buffer": "silent", "router": "healthy"}
    now = await seen(watch, **wanted)
    assert "0.5 s" in now["replay-buffer"]["detail"]
    assert now["reward-server"]["figures"].items() >= {"pending": 5, "workers alive": 2, "scored": 10}.items()
    assert now["router"]["figures"] == {"workers routed": 1, "requests in flight": 4}
    worker = (await seen(watch, figure="generated tokens", **{"rollout-server-0": "healthy"}))["rollout-server-0"]
    assert worker["policy_version"] == 7
    figures = worker["figures"]
    assert (figures["running"], figures["waiting"], figures["routed"]) == (3, 2, "yes")
    assert figures["generated tokens"] > 0

    await asyncio.to_thread(job_group)
    gone = (await seen(watch, **{"reward-server": "silent"}))["reward-server"]
    assert gone["seconds_since_answer"] > 0
    watching.cancel()


async def test_a_run_of_an_agent_shows_the_nodes_of_its_gateway(monkeypatch):
    mapping = {f"{task.value}-0:{PORTS[task][0]}": "127.0.0.1:9" for task in components.SERVICES}
    mapping |= {"gateway-0:8005": "127.0.0.1:9", "gateway-1:8005": "127.0.0.2:9"}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(mapping))
    watch = ComponentMonitor(None, (*components.SERVICES, Task.GATEWAY))
    watching = asyncio.create_task(watch.run())
    shown = await seen(watch, **{"gateway-1": "silent"})
    watching.cancel()
    assert shown["gateway-0"]["url"] == "http://127.0.0.1:9"
    assert shown["gateway-1"]["url"] == "http://127.0.0.2:9"
    assert "gateway-0" not in {component["name"] for component in ComponentMonitor(None).last_seen()}


async def test_a_page_that_nobody_looks_at_asks_nobody(job_group, monkeypatch):
    monkeypatch.setattr(components, "AWAKE_SECONDS", 0.3)
    watch = ComponentMonitor(token=None)
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0.3)
    assert {component["state"] for component in watch.last_seen()} == {"asking"}
    await seen(watch, **{"reward-server": "healthy"})

    def is_left_alone() -> bool:
        answered = next(c for c in watch.last_seen() if c["name"] == "reward-server")
        return answered["seconds_since_answer"] > 1

    await eventually(is_left_alone, "nobody asks any more")
    watching.cancel()


async def test_another_program_on_the_port_is_unhealthy_not_an_error(monkeypatch):
    other = FastAPI()

    @other.get("/health")
    @other.get("/stats")
    @other.get("/workers")
    def answer():
        return ["surprise"]

    monkeypatch.setattr(components, "POLL_SECONDS", 0.05)
    with served(other) as url:
        names = ("data-server-0:8000", "reward-server-0:8002", "replay-buffer-0:8003", "rollout-server-0:30000")
        mapping = dict.fromkeys(names, url.removeprefix("http://"))
        monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(mapping))
        watch = ComponentMonitor(token=None)
        watching = asyncio.create_task(watch.run())
        now = await seen(watch, **{"data-server": "unhealthy", "router": "unhealthy"})
        assert "something else than expected" in now["data-server"]["detail"]
        watching.cancel()
