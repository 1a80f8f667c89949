"""The watch over an engine that sleeps, against a worker and a trainer that answer as each test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE, STATUS_PORT
from services.core.supervisor import SupervisedProcess
from services.engines.engine import ASLEEP, Engine
from services.engines.settings import RolloutSettings
from services.rollout_server import watch as watch_module
from services.rollout_server.watch import EngineWatch
from tests.fake_service import FakeService, fake_service
from tests.services.rollout_server.test_registration import RunningEngine
from tests.waiting import IDLE_SECONDS

LOST_SECONDS = 0.2


class Worker:
    """A worker that sleeps, and the order in which it was told to wake."""

    def __init__(self, service: FakeService) -> None:
        self.version = f"7{ASLEEP}"
        self.calls: list[str] = []
        self.url = service.endpoint.url
        self.service = service
        service.routes |= {
            "GET /model_info": lambda _: {"weight_version": self.version},
            "POST /resume_memory_occupation": lambda _: self.note("memory"),
            "POST /update_weight_version": self.rename,
            "POST /continue_generation": lambda _: self.note("generation"),
            "GET /health_generate": lambda _: {},
        }

    def note(self, call: str) -> dict[str, Any]:
        self.calls.append(call)
        return {}

    def rename(self, request: dict[str, Any]) -> dict[str, Any]:
        self.version = request["new_version"]
        return {}


@pytest.fixture
def worker() -> Iterator[Worker]:
    with fake_service({}) as service:
        yield Worker(service)


async def never() -> bool:
    return False


async def always() -> bool:
    return True


async def watch_for(
    worker: Worker,
    seconds: float,
    *,
    engine: RunningEngine | None = None,
    is_updating: Callable[[], Awaitable[bool]] = never,
    **fields: Any,
) -> None:
    """Watch a worker until it is awake or its engine is killed, at most for some seconds."""
    engine = engine or RunningEngine()
    async with Engine(worker.url, timeout=IDLE_SECONDS) as admin:
        settings = RolloutSettings(engine_sleeps=True, service_deadline_seconds=5 * LOST_SECONDS, **fields)
        watch = EngineWatch(settings, admin, cast(SupervisedProcess, engine), is_updating)
        running = asyncio.create_task(watch.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while "generation" not in worker.calls and not engine.is_killed:  # noqa: ASYNC110  # in another thread
                    await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def trainer_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"ppo-trainer-0:{STATUS_PORT}": address}))


async def test_an_engine_wakes_when_its_trainer_is_gone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_at(monkeypatch, "127.0.0.1:1")
    await watch_for(worker, IDLE_SECONDS)
    assert (worker.calls, worker.version) == (["memory", "generation"], "7")


async def test_an_engine_sleeps_on_while_its_trainer_answers(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_service({"GET /health": lambda _: {}}) as trainer:
        trainer_at(monkeypatch, f"{trainer.endpoint.host}:{trainer.endpoint.port}")
        await watch_for(worker, 5 * LOST_SECONDS)
    assert (worker.calls, worker.version) == ([], f"7{ASLEEP}")


@pytest.mark.parametrize("is_updating", [never, always])
async def test_an_engine_is_killed_whose_scheduler_is_silent_unless_its_weights_change(
    worker: Worker, is_updating: Callable[[], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "HANG_SECONDS", 0.3)
    worker.version = "7"
    worker.service.routes["GET /health_generate"] = lambda _: 503
    engine = RunningEngine()
    engine.may_be_killed = is_updating is never
    seconds = IDLE_SECONDS if engine.may_be_killed else 1.5
    await watch_for(worker, seconds, engine=engine, is_updating=is_updating)
    assert engine.is_killed is engine.may_be_killed


async def test_a_paused_engine_is_not_silent(worker: Worker) -> None:
    """It generates no token for the check of its health, but its scheduler describes its state."""
    worker.service.routes |= {"GET /health_generate": lambda _: 503}
    async with Engine(worker.url, timeout=IDLE_SECONDS) as admin:
        assert not await admin.scheduler_answers(IDLE_SECONDS)
        worker.service.routes["GET /server_info"] = lambda _: {}
        assert await admin.scheduler_answers(IDLE_SECONDS)
