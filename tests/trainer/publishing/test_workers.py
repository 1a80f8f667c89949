"""The deadline of a worker that takes over a new version, with workers that answer as each test says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from services.core.errors import DependencyLostError
from services.core.tasks import ServiceThread
from services.engines.engine import ASLEEP, Embedded
from services.engines.proof import Evidence
from services.engines.router import Worker
from services.weights.policy_store import PolicyStore
from tests.fake_service import FakeService, fake_service, name_router
from tests.waiting import IDLE_SECONDS
from trainer.config import TrainerSettings
from trainer.publishing import publisher as module
from trainer.publishing.publisher import Publisher, ask_workers
from trainer.publishing.writer import VersionWriter

SECONDS_TO_LOAD = 0.8


def load_slowly(_request: dict[str, Any]) -> dict[str, Any]:
    time.sleep(SECONDS_TO_LOAD)
    return {"success": True}


@pytest.fixture
def worker() -> Iterator[FakeService]:
    ok: dict[str, Any] = {}
    routes: dict[str, Any] = {
        f"POST /{route}": lambda _: ok
        for route in ("pause_generation", "continue_generation", "begin_weight_update", "end_weight_update")
    }
    routes |= {"POST /update_weights_from_disk": load_slowly, "GET /model_info": lambda _: {"weight_version": "1"}}
    with fake_service(routes) as made:
        yield made


@pytest.fixture
def router(worker: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    registered = [{"id": "w", "url": worker.endpoint.url, "is_healthy": True}]
    with fake_service({"GET /workers": lambda _: {"workers": registered}}) as made:

        def remove(_request: dict[str, Any]) -> dict[str, Any]:
            registered.clear()
            return {}

        made.routes["DELETE /workers/w"] = remove
        name_router(made, monkeypatch)
        yield made


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """A publisher whose writer has written version 1."""
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r")
    store = PolicyStore(settings.policy_dir)
    store.begin(1)
    store.commit(1)
    writer = MagicMock(written=1, metrics={}, state={}, store=store, path=store.path(1), evidence=Evidence())
    with ServiceThread() as thread:
        yield Publisher(settings, thread, cast(VersionWriter, writer))


def test_a_worker_may_take_all_of_the_publishing_deadline(
    publisher: Publisher, worker: FakeService, router: FakeService
) -> None:
    assert publisher.publish(1)["workers"] == 1
    assert not router.asked("DELETE /workers/w")


def test_a_worker_that_takes_longer_leaves_the_routing(
    publisher: Publisher, worker: FakeService, router: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_SECONDS", SECONDS_TO_LOAD / 4)
    with pytest.raises(DependencyLostError, match="0 rollout workers serve policy version 1"):
        publisher.publish(1)
    assert router.asked("DELETE /workers/w")


def test_publishing_waits_for_as_many_workers_as_there_must_be(
    publisher: Publisher, router: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISH_SECONDS", 0.2)
    monkeypatch.setattr(publisher, "settings", publisher.settings.model_copy(update={"min_workers": 2}))
    with pytest.raises(DependencyLostError, match="MIN_WORKERS is 2"):
        publisher.publish(1)


async def test_each_answer_of_a_worker_may_take_the_publishing_deadline(
    publisher: Publisher, worker: FakeService
) -> None:
    # More than any request to a worker takes otherwise.
    async def timeout(engine: Any) -> float:
        return engine.timeout

    asked = publisher._with(Worker(id="w", url=worker.endpoint.url, is_healthy=True), timeout)
    assert await asked == module.PUBLISH_SECONDS


async def test_a_worker_that_falls_asleep_is_marked_before_its_memory_goes(
    worker: FakeService, router: FakeService
) -> None:
    # An engine that dies in between has neither the mark nor the sleep.
    ok: dict[str, Any] = {}
    done = ("/pause_generation", "/update_weight_version", "/release_memory_occupation")
    worker.routes |= {f"POST {route}": lambda _: ok for route in done}
    await ask_workers(TrainerSettings.load(), "sleep", lambda engine: engine.sleep())
    posts = [name.removeprefix("POST ") for name, _ in worker.requests if name.startswith("POST")]
    assert posts == [done[0], *done]
    assert [request["mode"] for request in worker.asked("POST /pause_generation")] == ["retract", "abort"]
    assert worker.asked("POST /update_weight_version")[0]["new_version"] == f"1{ASLEEP}"


async def test_a_worker_that_does_not_fall_asleep_ends_no_step(worker: FakeService, router: FakeService) -> None:
    worker.routes["POST /pause_generation"] = lambda _: 500
    await ask_workers(TrainerSettings.load(), "sleep", lambda engine: engine.sleep())
    assert worker.asked("POST /pause_generation")
    assert not router.asked("DELETE /workers/w")


async def test_a_sleeping_worker_wakes_before_a_change_of_weights(worker: FakeService) -> None:
    version = {"weight_version": f"7{ASLEEP}"}

    def rename(request: dict[str, Any]) -> dict[str, Any]:
        version["weight_version"] = request["new_version"]
        return {}

    worker.routes |= {
        "GET /model_info": lambda _: version,
        "POST /update_weight_version": rename,
        "POST /resume_memory_occupation": lambda _: {},
        "POST /pause_generation": lambda _: {},
    }
    async with Embedded(worker.endpoint.url, timeout=IDLE_SECONDS) as control:
        for _ in range(2):  # a worker that is awake is not woken
            await control.hold("continue")
    assert version == {"weight_version": "7"}
    posts = [name for name, _ in worker.requests if name.startswith("POST")]
    assert posts == [
        "POST /resume_memory_occupation",
        "POST /update_weight_version",
        "POST /pause_generation",
        "POST /pause_generation",
    ]
