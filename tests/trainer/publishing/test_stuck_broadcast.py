"""A collective that never returns costs its group and its publication's workers, and no later publication."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import structlog

from services.core.endpoints import ENDPOINTS_VARIABLE, ROUTER_PORT, WEIGHTS_BROADCAST_PORT
from services.core.tasks import ServiceThread
from services.engines.router import NCCL_LABEL
from services.weights.broadcast_group import CUMEM, match_engines_nccl
from services.weights.policy_store import PolicyStore
from tests.fake_service import FakeService, fake_service
from tests.trainer.tiny import FAMILIES, save_model
from tests.waiting import IDLE_SECONDS, wait_until
from trainer.config import TrainerSettings, Transport
from trainer.loop import TrainingLoop
from trainer.model import saving
from trainer.model.loading import count_parameters
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing import broadcast
from trainer.publishing import writer as module
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter

FORM_SECONDS = 2.0


class Worker:
    """A worker that receives at once; its launcher loads what it missed from disk as soon as it is unregistered."""

    def __init__(self, service: FakeService, members: Members) -> None:
        self.service = service
        self.members = members
        self.served = 0
        self.newest = 0
        self.drops = 0
        self.groups: set[str] = set()
        self.refuses = False
        self.joins = True
        self.labels: dict[str, str] = {}
        for route in ("begin_weight_update", "end_weight_update", "pause_generation", "continue_generation"):
            service.routes[f"POST /{route}"] = lambda _: {}
        service.routes |= {
            "GET /model_info": lambda _: {"weight_version": str(self.served)},
            "GET /server_info": lambda _: {"tp_size": 1},
            "POST /init_weights_update_group": self.join,
            "POST /destroy_weights_update_group": self.leave,
            "POST /update_weights_from_distributed": self.receive,
            "POST /update_weights_from_disk": self.load,
        }

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        assert (Path(request["model_path"]) / "model.safetensors").is_file(), "it is there before workers load it"
        self.served = int(request["weight_version"])
        return {"success": True}

    def join(self, request: dict[str, Any]) -> Any:
        if not self.joins:
            return 400
        self.groups.add(request["group_name"])
        return {"success": True}

    def leave(self, request: dict[str, Any]) -> Any:
        self.groups.discard(request["group_name"])
        return {"success": True}

    def receive(self, request: dict[str, Any]) -> Any:
        assert request["load_format"] == "flattened_bucket"
        if self.refuses:
            return 400
        if not self.members.connected.wait(IDLE_SECONDS):
            return 400
        self.served = int(request["weight_version"] or self.served)
        return {"success": True}

    def remove(self, _: dict[str, Any]) -> dict[str, Any]:
        self.drops += 1
        self.served = self.newest
        return {}

    def workers(self, _: dict[str, Any]) -> dict[str, Any]:
        name = f"w{self.drops}"
        worker = {"id": name, "url": self.service.endpoint.url, "is_healthy": True, "metadata": self.labels}
        return {"workers": [worker]}


class Members:
    """The groups' collectives: those of the first ``stuck`` groups never return."""

    def __init__(self) -> None:
        self.stuck = 0
        self.made = 0
        self.left: list[int] = []
        self.sent: list[int] = []
        self.connected = threading.Event()
        self.over = threading.Event()

    def join(self, *_: Any) -> int:
        self.made += 1
        return self.made

    def broadcast(self, tensor: Any, group: int, **_: Any) -> None:
        if group <= self.stuck:
            self.over.wait(IDLE_SECONDS)
        self.sent.append(group)
        self.connected.set()


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    made = Members()
    monkeypatch.setattr(broadcast, "join_weights_group", made.join)
    monkeypatch.setattr("services.weights.broadcast_group.dist.broadcast", made.broadcast)
    monkeypatch.setattr(broadcast, "leave_weights_group", made.left.append)
    yield made
    made.over.set()


@pytest.fixture
def publisher(
    request: pytest.FixtureRequest, members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Publisher, Worker]]:
    model = save_model(tmp_path / "model", FAMILIES["qwen2"])
    transport = getattr(request, "param", Transport.BROADCAST)
    settings = TrainerSettings.load(model_name=str(model), shared_dir=tmp_path, run_id="r", publish_transport=transport)
    with fake_service({}) as service, fake_service({}) as router, join_ranks() as ranks, ServiceThread() as thread:
        worker = Worker(service, members)
        router.routes["GET /workers"] = worker.workers
        for number in range(5):
            router.routes[f"DELETE /workers/w{number}"] = worker.remove
        address = f"{router.endpoint.host}:{router.endpoint.port}"
        addresses = {
            f"rollout-server-0:{ROUTER_PORT}": address,
            f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": "127.0.0.1:1",
        }
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
        made = Publisher(settings, thread, VersionWriter(settings, load_policy(settings, ranks), ranks))
        if made.broadcaster is not None:
            made.broadcaster.flattens = True  # as over NCCL
        yield made, worker
        members.connected.set()
        made.writer.close()


def publish(publisher: Publisher, worker: Worker, version: int) -> float:
    """Publish and return the seconds that it took."""
    worker.newest = version
    started = time.monotonic()
    assert publisher.publish(version)["workers"] == 1
    assert worker.served == version
    return time.monotonic() - started


def test_a_publication_whose_group_never_forms_ends_by_its_deadline_and_the_next_one_works(
    publisher: tuple[Publisher, Worker], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.stuck = 1
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "FORM_SECONDS", FORM_SECONDS)
        seconds = publish(*publisher, 1)
    assert FORM_SECONDS <= seconds < IDLE_SECONDS / 2
    worker = publisher[1]
    assert worker.drops == 1, "its launcher has loaded the version"
    assert (members.left, worker.groups) == ([1], set()), "both sides have left the group"
    publish(*publisher, 2)
    publish(*publisher, 3)
    assert worker.drops == 1
    assert members.made == 2
    assert set(members.sent) == {2}
    assert len(worker.groups) == 1


def test_a_worker_that_fails_ends_the_broadcast_at_once(publisher: tuple[Publisher, Worker], members: Members) -> None:
    members.stuck, publisher[1].refuses = 1, True
    assert publish(*publisher, 1) < IDLE_SECONDS / 2
    assert members.left == [1]
    publisher[1].refuses = False
    publish(*publisher, 2)
    assert publisher[1].drops == 1


@pytest.mark.parametrize("fault", ["joins", "refuses"], ids=["no group", "no first collective"])
def test_a_broadcast_that_never_works_gives_way_to_the_volume(
    publisher: tuple[Publisher, Worker], members: Members, fault: str
) -> None:
    made, worker = publisher
    members.stuck = 1000
    setattr(worker, fault, fault == "refuses")
    with structlog.testing.capture_logs() as logged:
        publish(*publisher, 1)
        assert not made.refusal
        publish(*publisher, 2)
        assert worker.drops == 2
        for version in (3, 4):
            publish(*publisher, version)
            assert made.publish(version)["publish_by_disk"] == 1
    assert worker.drops == 2, "all workers serve, without being loaded anew by their launchers"
    [error] = [entry for entry in logged if entry["log_level"] == "error"]
    assert "PUBLISH_TRANSPORT=disk" in error["event"]
    assert error["reason"] == made.refusal
    assert "400" in error["reason"]


@pytest.mark.parametrize(("theirs", "sent"), [("2.28.3", []), ("2.30.7", [1, 1, 1]), (None, [1, 1, 1])])
def test_a_worker_with_another_nccl_gets_the_first_version_from_the_volume(
    publisher: tuple[Publisher, Worker], members: Members, monkeypatch: pytest.MonkeyPatch, theirs: str, sent: list[int]
) -> None:
    made, worker = publisher
    assert made.broadcaster is not None
    made.broadcaster.backend = "nccl"
    monkeypatch.setattr("trainer.publishing.publisher.installed_nccl", lambda: "2.30.7")
    worker.labels = {NCCL_LABEL: theirs} if theirs else {}
    with structlog.testing.capture_logs() as logged:
        publish(made, worker, 1)
        assert ("publish_by_disk" in made.publish(2)) == (not sent)
    made.writer.close()
    assert (members.sent, worker.drops) == (sent, 0)
    errors = [entry for entry in logged if entry["log_level"] == "error"]
    if sent:
        assert not errors
    else:
        [error] = errors
        assert error["version_bytes"] == 2 * count_parameters(made.writer.policy)
        assert error["seconds_by_volume"] >= error["seconds_by_broadcast"] >= 1
        assert "nvidia-nccl-cu13==2.30.7" in error["event"]
        assert error["reason"] == made.refusal


def test_a_version_that_is_sent_and_written_leaves_the_memory(
    publisher: tuple[Publisher, Worker], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, worker = publisher
    gather, sent = module.gather_state, []

    def gathered(*args: Any, **options: Any) -> Any:
        state = gather(*args, **options)
        sent.append(weakref.ref(next(iter(state.values()))))
        return state

    monkeypatch.setattr(module, "gather_state", gathered)
    publish(made, worker, 1)
    made.writer.close()
    gc.collect()
    assert [tensor() for tensor in sent] == [None], "but the group stays, for the next version"


def test_a_late_worker_loads_the_newest_version_on_a_slow_volume_and_the_next_broadcast_brings_it_up_to_date(
    publisher: tuple[Publisher, Worker], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, worker = publisher
    write, may_write = module.write_version, threading.Event()

    def slow(store: PolicyStore, version: int, save: Any) -> None:
        assert version == 1 or may_write.wait(IDLE_SECONDS)
        write(store, version, save)

    monkeypatch.setattr(module, "write_version", slow)
    publish(made, worker, 1)
    wait_until(lambda: made.writer.store.newest() is not None, "the first version is on the volume")
    for version in (2, 3):
        publish(made, worker, version)
    newest = made.writer.store.newest()
    assert newest is not None
    # Restarted, so that the router lists it under another name.
    worker.served, worker.drops = newest.version, 1
    assert worker.served == 1
    publish(made, worker, 4)
    assert worker.drops == 1, "nobody was dropped"
    may_write.set()
    made.writer.close()
    assert [policy.version for policy in made.writer.store.published()][-1] == 4


def test_a_new_group_is_formed_by_one_small_tensor_and_then_gets_buckets(
    publisher: tuple[Publisher, Worker], members: Members
) -> None:
    for version in (1, 2):
        publish(*publisher, version)
    requests = publisher[1].service.asked("POST /update_weights_from_distributed")
    first, second, third = requests
    assert len(first["names"]) == 1
    assert first["weight_version"] is None
    assert sorted([*first["names"], *second["names"]]) == sorted(third["names"])
    assert members.sent == [1, 1, 1]


PRODUCT = tuple(str(Path(broadcast.__file__).parents[2] / room) for room in ("trainer", "services"))


def functions(codes: Iterable[CodeType]) -> list[str]:
    """Return the names of the product's functions among these."""
    return [code.co_qualname for code in codes if code.co_filename.startswith(PRODUCT)]


def stack(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code of the frames from the outermost to this one."""
    if frame is not None:
        yield from stack(frame.f_back)
        yield frame.f_code


async def awaited() -> list[list[CodeType]]:
    """Return the code of the coroutines of each task of this loop, each of which waits for the next."""
    chains = []
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        coroutine: Any = task.get_coro()
        chains.append([])
        while hasattr(coroutine, "cr_code"):
            chains[-1].append(coroutine.cr_code)
            coroutine = coroutine.cr_await
    return chains


@pytest.mark.parametrize("publisher", [Transport.DISK, Transport.BROADCAST], indirect=True)
def test_a_version_takes_at_most_ten_functions_from_publish_to_its_first_byte(
    publisher: tuple[Publisher, Worker], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By disk to the volume's and to the worker's request, by broadcast to the collective."""
    made, worker = publisher
    main, paths, asking = threading.get_ident(), [], []

    def call(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        asking[:] = [*functions(stack(sys._getframe())), original.__qualname__]
        return original(*arguments, **options)

    def note(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        path = functions(stack(sys._getframe())) if threading.get_ident() == main else [*asking]
        if threading.get_ident() != main:
            tasks = map(functions, asyncio.run_coroutine_threadsafe(awaited(), made.services._loop).result())
            # Beside the way of the bytes, workers are asked to receive them.
            path += [name for names in tasks if "Engine.receive_weights" not in names for name in names]
            path += functions(stack(sys._getframe()))
        paths.append(path)
        return original(*arguments, **options)

    monkeypatch.setattr(made.services, "call", partial(call, made.services.call))
    service = worker.service.routes
    service["POST /update_weights_from_disk"] = partial(note, service["POST /update_weights_from_disk"])
    monkeypatch.setattr(saving, "save_torch_state_dict", partial(note, saving.save_torch_state_dict))
    monkeypatch.setattr("services.weights.broadcast_group.dist.broadcast", partial(note, members.broadcast))
    loop = MagicMock(publisher=made, state=SimpleNamespace(policy_version=1), remember_answers=lambda: 0.0)
    TrainingLoop.publish(loop)
    made.writer.close()
    ways = [path for path in paths if "VersionWriter._write_next" not in path]
    assert [5 < len(path) <= 10 for path in ways] == [True, True], ways


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_nccl_gets_its_memory_as_in_sglang(monkeypatch: pytest.MonkeyPatch, before: str | None, after: str) -> None:
    monkeypatch.setenv(CUMEM, "")
    monkeypatch.delenv(CUMEM)
    if before is not None:
        monkeypatch.setenv(CUMEM, before)
    match_engines_nccl()
    assert os.environ[CUMEM] == after
