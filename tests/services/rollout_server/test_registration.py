"""The registration of a worker, and the watch over an engine that sleeps.

Engine, router and trainer answer as each test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE, STATUS_PORT
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.supervisor import SupervisedProcess
from services.engines.engine import ASLEEP, Embedded, Engine
from services.engines.proof import REFUSED_FILES, Evidence
from services.engines.router import RouterAdmin
from services.engines.settings import RolloutSettings
from services.rollout_server import registration as module
from services.rollout_server import watch as watch_module
from services.rollout_server.registration import WorkerRegistration
from services.rollout_server.watch import watch_engine
from services.weights.policy_store import PolicyStore
from tests.fake_service import FakeService, fake_service
from tests.waiting import IDLE_SECONDS

HOLD_SECONDS = 600.0


class RunningEngine:
    """An engine that was started once, answered, and runs until it is killed."""

    may_be_killed = False
    is_killed = False

    async def wait_until_healthy(self, after: int) -> int:
        if after:
            await asyncio.Event().wait()
        return 1

    def is_running(self, start: int) -> bool:
        return start == 1 and not self.is_killed

    def kill(self) -> None:
        assert self.may_be_killed, "the engine was killed"
        self.is_killed = True


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


def settings(directory: Path, **fields: Any) -> RolloutSettings:
    return RolloutSettings.load(shared_dir=directory, run_id="test", **fields)


Until = Callable[[Callable[[], object]], Any]


@asynccontextmanager
async def registered(
    node: Node, settings: RolloutSettings, engine: RunningEngine | None = None, kind: type[Engine] = Engine
) -> AsyncIterator[Until]:
    """The registration runs within it; it yields a wait for a condition, which ends with the registration."""
    async with (
        asyncio.timeout(IDLE_SECONDS),
        RouterAdmin(node.router.endpoint) as router,
        kind(node.worker.endpoint.url, timeout=IDLE_SECONDS) as worker,
    ):
        process = cast(SupervisedProcess, engine or RunningEngine())
        running = asyncio.create_task(WorkerRegistration(settings, worker, router, process).run())

        async def until(condition: Callable[[], object]) -> None:
            while not condition() and not running.done():  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)

        try:
            yield until
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_a_version_stays_while_a_worker_loads_it(node: Node, tmp_path: Path) -> None:
    node.publish(1)
    async with registered(node, settings(tmp_path)) as until:
        await until(lambda: node.version == "3" and node.registered)
    assert node.loaded == ["1", "3"], "it loaded the version that it found, and then the newest"
    node.store.prune(1, HOLD_SECONDS)
    assert [path.name for path in node.store.policy_dir.iterdir()] == ["v000003"], "nothing is held any more"


async def test_a_worker_is_registered_once_it_has_proven_the_version(node: Node, tmp_path: Path) -> None:
    node.loaded = ["first weights"]
    node.publish(1)
    directory, digest = node.store.path(1), "00000000"
    Evidence(digests={1: {"w": ["0000000a"]}}).write(1, directory)
    node.worker.routes["POST /weights_checker"] = lambda _: {"ranks": [{"checksums": {"w": digest}}]}
    async with registered(node, settings(tmp_path), kind=Embedded) as until:
        await until(lambda: len([*directory.glob(REFUSED_FILES)]) == 2)
        assert not node.router.asked("POST /workers")
        digest = "0000000a"
        await until(lambda: node.registered)
    assert node.loaded[1:] == ["1"] * len(node.loaded[1:])
    refused = [json.loads(path.read_bytes()) for path in directory.glob(REFUSED_FILES)]
    found = {(each["worker"], each["confirmed"], *each["tensors"]) for each in refused}
    assert found == {(node.worker.endpoint.url, 1, "w")}


async def test_a_stale_worker_is_left_to_a_trainer_that_answers(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.loaded = ["first weights"]
    node.publish(1)
    with fake_service({"GET /health": lambda _: {}}) as trainer:
        address = f"{trainer.endpoint.host}:{trainer.endpoint.port}"
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"ppo-trainer-0:{STATUS_PORT}": address}))
        async with registered(node, settings(tmp_path, service_deadline_seconds=1)) as until:
            await until(lambda: node.registered)
            looked = len(node.router.asked("GET /health"))
            await until(lambda: len(node.router.asked("GET /health")) > looked)
            node.publish(2)
            await asyncio.sleep(1)
            assert node.loaded == ["first weights", "1"], "the trainer is publishing it"
            assert node.registered
            trainer.routes.clear()
            await until(lambda: node.version == "2" and node.registered)
            looked = len(node.router.asked("GET /health"))
            await until(lambda: len(node.router.asked("GET /health")) > looked)
            trainer.routes["GET /health"] = lambda _: {}
            monkeypatch.setattr(module, "PUBLICATION_SECONDS", 1)
            node.publish(3)
            await until(lambda: node.version == "3")
    assert node.loaded == ["first weights", "1", "2", "3"]


def lose_the_versions(node: Node) -> None:
    shutil.rmtree(node.store.policy_dir)
    node.registered.clear()


def drop(node: Node) -> None:
    """Take the worker out of the routing, as a trainer does whose versions it misses."""
    node.registered.clear()


def stop_router(node: Node) -> None:
    del node.router.routes["GET /health"]


@pytest.mark.parametrize(
    ("published", "fault", "error", "reason"),
    [
        (1, lose_the_versions, DependencyLostError, "held policy version 1 and is empty or missing now"),
        (0, drop, ConfigurationError, "is SHARED_DIR the same volume on this node"),
        (0, stop_router, DependencyLostError, "the router does not answer"),
    ],
    ids=["volume lost", "another volume", "router lost"],
)
async def test_a_node_that_loses_its_volume_or_its_router_ends(
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: int,
    fault: Callable[[Node], None],
    error: type[Exception],
    reason: str,
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    node.loaded = ["first weights"]
    if published:
        node.publish(published)

    async def live() -> None:
        async with registered(node, settings(tmp_path, service_deadline_seconds=0.5)) as until:
            for _ in range(2 + module.MAX_TRIES if fault is drop else 1):
                await until(lambda: node.registered)
                looked = len(node.router.asked("GET /health"))
                await until(lambda: len(node.router.asked("GET /health")) > looked)  # noqa: B023  # awaited at once
                fault(node)
            await until(lambda: False)

    with pytest.raises(error, match=reason):
        await live()


async def test_an_engine_that_refuses_the_newest_version_is_killed_after_some_tries(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    node.publish(1)
    node.worker.routes["POST /update_weights_from_disk"] = lambda _: 400
    engine = RunningEngine()
    engine.may_be_killed = True
    async with registered(node, settings(tmp_path), engine) as until:
        await until(lambda: engine.is_killed)
    assert len(node.worker.asked("POST /update_weights_from_disk")) == module.MAX_TRIES
    assert not node.registered


async def test_a_worker_whose_engine_starts_again_leaves_the_routing_first(node: Node, tmp_path: Path) -> None:
    async with (
        RouterAdmin(node.router.endpoint) as router,
        Engine(node.worker.endpoint.url, timeout=IDLE_SECONDS) as worker,
    ):
        process = cast(SupervisedProcess, RunningEngine())
        registration = WorkerRegistration(settings(tmp_path), worker, router, process)
        await registration.withdraw()
        assert not node.router.requests, "it was never registered"
        running = asyncio.create_task(registration.run())
        async with asyncio.timeout(IDLE_SECONDS):
            while not node.registered:  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await registration.withdraw()
        assert not node.registered
        assert not await registration.is_updating()
        node.store.begin(1)
        assert await registration.is_updating(), "the trainer is writing a newer version"
        node.router.routes.clear()
        await registration.withdraw_if_possible()


async def test_a_worker_among_many_looks_at_the_list_less_often(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"POLL_SECONDS": 0.1, "WORKERS_A_POLL": 0.1, "LONGEST_POLL_SECONDS": IDLE_SECONDS}.items():
        monkeypatch.setattr(module, name, value)
    node.registered += [{"id": str(i), "url": f"http://10.0.0.{i}:1", "is_healthy": True} for i in range(160)]
    async with registered(node, settings(tmp_path)) as until:
        await until(lambda: len(node.registered) == 161)
        asked = len(node.router.asked("GET /health"))
        await asyncio.sleep(1)
        assert len(node.router.asked("GET /health")) == asked


# --- the watch over an engine that sleeps ----------------------------------------------------------------------------


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
        watch = watch_engine(settings, admin, cast(SupervisedProcess, engine), is_updating)
        running = asyncio.create_task(watch)
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
