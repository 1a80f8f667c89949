"""The registration of a worker against an engine and a router that answer as each test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from services.core.supervisor import SupervisedProcess
from services.engines.router import RouterAdmin
from services.engines.settings import RolloutSettings
from services.engines.sglang import SGLang
from services.rollout_server.registration import LONGEST_POLL_SECONDS, POLL_SECONDS, WorkerRegistration, poll_seconds
from services.weights.policy_store import CHANGES_FILE, PolicyStore
from tests.fake_service import FakeService, fake_service
from tests.waiting import IDLE_SECONDS

HOLD_SECONDS = 600.0


class RunningEngine:
    """An engine that was started once, answered, and runs."""

    async def wait_until_healthy(self, after: int) -> int:
        if after:
            await asyncio.Event().wait()
        return 1

    def is_running(self, start: int) -> bool:
        return start == 1

    def kill(self) -> None:
        raise AssertionError("the engine was killed")


class Node:
    """A worker and a router, as fakes, and the versions published for them."""

    def __init__(self, store: PolicyStore, worker: FakeService, router: FakeService) -> None:
        self.store = store
        self.worker = worker
        self.router = router
        self.version = "0"
        self.loaded: list[str] = []
        self.registered: list[dict[str, Any]] = []
        ok: dict[str, Any] = {}
        worker.routes |= {
            "GET /health": lambda _: ok,
            "GET /model_info": lambda _: {"weight_version": self.version},
            "POST /pause_generation": lambda _: ok,
            "POST /continue_generation": lambda _: ok,
            "POST /end_weight_update": lambda _: ok,
            "POST /update_weights_from_disk": self.load,
        }
        router.routes |= {
            "GET /health": lambda _: ok,
            "GET /workers": lambda _: {"workers": self.registered},
            "POST /workers": self.register,
            "DELETE /workers/w": lambda _: self.registered.clear() or ok,
        }

    def publish(self, version: int) -> None:
        (self.store.begin(version) / "weights").write_text(str(version))
        self.store.commit(version)
        self.store.prune(1, HOLD_SECONDS)

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Others are published while it loads, as by a trainer whose steps take less time."""
        for further in range(2 if not self.loaded else 0):
            self.publish(int(request["weight_version"]) + 1 + further)
        self.loaded.append((Path(request["model_path"]) / "weights").read_text())
        self.version = request["weight_version"]
        return {"success": True}

    def register(self, request: dict[str, Any]) -> dict[str, Any]:
        self.registered.append({"id": "w", "url": request["url"], "is_healthy": True})
        return {}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        worker, router = (stack.enter_context(fake_service({})) for _ in range(2))
        yield Node(PolicyStore(settings(tmp_path).policy_dir), worker, router)


def settings(directory: Path) -> RolloutSettings:
    return RolloutSettings.load(shared_dir=directory, run_id="test")


@asynccontextmanager
async def registered(node: Node, directory: Path) -> AsyncIterator[None]:
    """The registration runs within it."""
    async with (
        RouterAdmin(node.router.endpoint) as router,
        SGLang(node.worker.endpoint.url, timeout=IDLE_SECONDS) as worker,
    ):
        engine = cast(SupervisedProcess, RunningEngine())
        running = asyncio.create_task(WorkerRegistration(settings(directory), worker, router, engine).run())
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_a_version_stays_while_a_worker_loads_it(node: Node, tmp_path: Path) -> None:
    node.publish(1)
    async with registered(node, tmp_path), asyncio.timeout(IDLE_SECONDS):
        while node.version != "3" or not node.registered:  # noqa: ASYNC110  # in another thread
            await asyncio.sleep(0.01)
    assert node.loaded == ["1", "3"], "it loaded the version that it found, and then the newest"
    node.store.prune(1, HOLD_SECONDS)
    assert [path.name for path in node.store.policy_dir.iterdir()] == ["v000003"], "nothing is held any more"


async def test_a_launcher_without_a_copy_takes_the_newest_whole_version(node: Node, tmp_path: Path) -> None:
    node.loaded = ["first weights"]
    node.publish(1)
    (node.store.begin(2) / CHANGES_FILE).touch()
    node.store.commit(2)
    async with registered(node, tmp_path), asyncio.timeout(IDLE_SECONDS):
        while not node.registered:  # noqa: ASYNC110  # in another thread
            await asyncio.sleep(0.01)
    assert node.loaded == ["first weights", "1"]


def test_many_workers_ask_the_router_no_more_than_sixteen() -> None:
    assert [poll_seconds(workers) / POLL_SECONDS for workers in (0, 1, 16, 64)] == [1, 1, 1, 4]
    assert poll_seconds(10_000) == LONGEST_POLL_SECONDS


async def test_a_worker_among_many_looks_at_the_list_less_often(node: Node, tmp_path: Path) -> None:
    node.registered += [{"id": str(i), "url": f"http://10.0.0.{i}:1", "is_healthy": True} for i in range(160)]
    async with registered(node, tmp_path), asyncio.timeout(IDLE_SECONDS):
        while len(node.registered) < 161:  # noqa: ASYNC110  # in another thread
            await asyncio.sleep(0.01)
        asked = len(node.router.asked("GET /health"))
        await asyncio.sleep(3 * POLL_SECONDS)
        assert len(node.router.asked("GET /health")) == asked
