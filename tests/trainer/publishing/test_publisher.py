"""A policy version that the shared volume does not take, or loses; workers are fakes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import safetensors.torch
import structlog
import torch
from safetensors import SafetensorError

from services.core import machine
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.machine import memory_directory, memory_of_run
from services.core.tasks import InterruptedCallError, ServiceThread
from services.engines.router import ENGINE_LABEL, Worker
from services.weights.policy_store import PolicyStore
from tests.fake_service import fake_service, name_router
from tests.trainer.rank_jobs import change, make_learner
from tests.trainer.tiny import FAMILIES, save_model
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.config import TrainerSettings, Transport
from trainer.model import saving
from trainer.model.critic import CriticLearner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import DiskFullError
from trainer.publishing import publisher as publisher_module
from trainer.publishing import writer as module
from trainer.publishing.publisher import WRITES, Publisher, VersionGoneError, check_hosts
from trainer.publishing.writer import GpuBuckets, VersionWriter, write_version
from trainer.rank_calls import RankCalls


@pytest.fixture
def alone() -> Iterator[tuple[Ranks, ServiceThread]]:
    with join_ranks() as ranks, ServiceThread() as thread:
        yield ranks, thread


def make(
    directory: Path, alone: tuple[Ranks, ServiceThread], transport: Transport = Transport.DISK, lora_rank: int = 0
) -> Publisher:
    model = save_model(directory / "model", FAMILIES["qwen2"])
    settings = TrainerSettings.load(
        model_name=str(model),
        shared_dir=directory,
        run_id="r",
        compute_type="float32",
        publish_transport=transport,
        lora_rank=lora_rank,
    )
    return Publisher(settings, alone[1], VersionWriter(settings, load_policy(settings, alone[0]), alone[0]))


def answer_for_workers(publisher: Publisher, metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no worker."""

    def call(work: Coroutine[Any, Any, Any], **_: Any) -> dict[str, float]:
        work.close()
        return metrics

    monkeypatch.setattr(publisher.services, "call", call)


class ForgetfulVolume:
    """A worker, its launcher and a router, for versions that are deleted the first ``losses`` times that one is loaded.

    As the real launcher, this one registers the worker again once there is a version for it to load.
    """

    def __init__(self, store: PolicyStore, losses: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.losses = losses
        self.loads = 0
        self.served = 0
        self.is_registered = True
        worker = stack.enter_context(fake_service({}))
        self.url = worker.endpoint.url
        for route in ("begin_weight_update", "end_weight_update", "pause_generation", "continue_generation"):
            worker.routes[f"POST /{route}"] = lambda _: {}
        worker.routes |= {
            "POST /update_weights_from_disk": self.load,
            "GET /model_info": lambda _: {"weight_version": str(self.served)},
        }
        router = stack.enter_context(fake_service({"GET /workers": self.workers, "DELETE /workers/w": self.remove}))
        name_router(router, monkeypatch)

    def load(self, request: dict[str, Any]) -> Any:
        self.loads += 1
        if self.loads <= self.losses:
            shutil.rmtree(self.store.policy_dir)
            return 400
        self.served = int(request["weight_version"])
        return {"success": True}

    def remove(self, _: dict[str, Any]) -> dict[str, Any]:
        self.is_registered = False
        return {}

    def workers(self, _: dict[str, Any]) -> dict[str, Any]:
        self.is_registered = self.is_registered or self.store.newest() is not None
        return {"workers": [{"id": "w", "url": self.url, "is_healthy": True}] if self.is_registered else []}


def test_a_version_that_is_deleted_before_workers_have_it_is_written_again(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make(tmp_path, alone)
    with ExitStack() as stack:
        volume = ForgetfulVolume(publisher.writer.store, 2, stack, monkeypatch)
        assert publisher.publish(1)["workers"] == 1
    assert volume.served == 1
    assert publisher.writer.store.path(1).is_dir()


def test_adapters_that_sglang_does_not_compute_with_end_a_run_before_its_first_step(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make(tmp_path, alone, lora_rank=2)
    monkeypatch.setattr(publisher.writer.policy.config, "model_type", "lfm2")
    worker = {"id": "w", "url": "http://127.0.0.1:1", "is_healthy": True, "metadata": {ENGINE_LABEL: "sglang"}}
    with fake_service({"GET /workers": lambda _: {"workers": [worker]}}) as router:
        name_router(router, monkeypatch)
        with pytest.raises(ConfigurationError, match=r"LORA_RANK is 2, but SGLang .* 'lfm2'"):
            publisher.publish(0)


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_is_released_when_the_version_is_written_and_before_workers_load_it(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    publisher = make(tmp_path, alone)
    publisher.writer.settings = publisher.settings.model_copy(update={"keep_memory": keeps})
    released = []
    with ExitStack() as stack:
        volume = ForgetfulVolume(publisher.writer.store, 0, stack, monkeypatch)
        monkeypatch.setattr(
            machine, "release_memory", lambda: released.append((publisher.writer.store.path(1).is_dir(), volume.loads))
        )
        publisher.publish(1)
    assert volume.loads == 1
    assert released == ([] if keeps else [(True, 0)])


def test_a_version_that_disappears_each_time_ends_the_run(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make(tmp_path, alone)
    with ExitStack() as stack:
        volume = ForgetfulVolume(publisher.writer.store, 1000, stack, monkeypatch)
        with pytest.raises(VersionGoneError, match="has gone from"):
            publisher.publish(1)
    assert volume.loads == WRITES


@pytest.mark.parametrize("transport", Transport)
def test_a_run_that_is_asked_to_stop_waits_for_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    asked = threading.Event()

    def no_worker(_: Any) -> Any:
        asked.set()
        return {"workers": []}

    with ExitStack() as stack:
        ranks, thread = stack.enter_context(join_ranks()), stack.enter_context(ServiceThread(asked.is_set))
        router = stack.enter_context(fake_service({"GET /workers": no_worker}))
        name_router(router, monkeypatch)
        # So that a publication which does not listen fails soon.
        monkeypatch.setattr(publisher_module, "PUBLISH_SECONDS", IDLE_SECONDS)
        publisher = make(tmp_path, (ranks, thread), transport)
        stack.callback(publisher.writer.close)
        with pytest.raises(InterruptedCallError):
            publisher.publish(1)


@pytest.mark.parametrize("transport", Transport)
def test_a_version_is_written_without_any_worker_and_only_once(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    publisher = make(tmp_path, alone, transport)
    publisher.writer.write(3)
    publisher.writer.close()
    newest = publisher.writer.store.newest()
    assert newest is not None
    assert newest.version == 3
    monkeypatch.setattr(publisher.writer, "write", lambda _: pytest.fail("written twice"))
    answer_for_workers(publisher, {"workers": 3.0}, monkeypatch)
    assert publisher.publish(3) == {"workers": 3.0}


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("transport", Transport)
def test_a_full_disk_leaves_nothing_of_the_version_that_it_did_not_take(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    publisher = make(tmp_path, alone, transport)
    if transport is Transport.LOCAL:
        monkeypatch.setattr(shutil, "copy", full)  # from memory to the volume
    else:
        error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        monkeypatch.setattr(saving, "save_torch_state_dict", MagicMock(side_effect=error))
    if transport is not Transport.DISK:
        publisher.writer.write(0)  # beside the training, so that the next version meets the error
        wait_until(publisher.writer._writes[0].done, "the write has failed")
    with pytest.raises(DiskFullError, match=r"the disk is full: .*/policy/?.* cannot be written"):
        publisher.writer.write(1)
    publisher.writer.close()
    assert list(publisher.writer.store.policy_dir.iterdir()) == []


def in_memory(settings: TrainerSettings) -> list[Path]:
    return sorted(memory_directory().glob(f"{memory_of_run(settings.policy_dir).name}*"))


def test_a_version_stays_in_memory_while_it_is_written_to_the_volume(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make(tmp_path, alone, Transport.LOCAL).settings
    memory_of_run(settings.policy_dir).mkdir()  # of a trainer that was killed
    writer = VersionWriter(settings, load_policy(settings, alone[0]), alone[0])
    write = module.write_version
    read: list[bytes] = []

    def slow(store: PolicyStore, version: int, save: Any) -> None:
        time.sleep(0.5)  # for the next version, which must not come
        write(store, version, save)
        [directory] = in_memory(settings)
        read.append((directory / "model.safetensors").read_bytes())
        assert read[-1] == (store.path(version) / "model.safetensors").read_bytes()

    monkeypatch.setattr(module, "write_version", slow)
    for version in range(3):
        change(writer.policy, 1e-2)
        writer.write(version)
        assert in_memory(settings) == [writer.path]
        wait_until(lambda: not writer._next, "the thread has begun")
    writer.close()
    assert len({*read}) == 3
    assert in_memory(settings) == []


def test_workers_on_other_hosts_share_no_memory() -> None:
    check_hosts([Worker(id="w", url="http://127.0.0.1:30001", is_healthy=True)])
    with pytest.raises(ConfigurationError, match="on another host"):
        check_hosts([Worker(id="w", url="http://192.0.2.1:30001", is_healthy=True)])


class FakeBuckets:
    """The memory of GPUs, which no processor has."""

    is_filled = False

    def fill(self, _: Any) -> None:
        self.is_filled = True

    def release(self) -> None:
        self.is_filled = False


def test_a_version_that_is_written_again_for_the_volume_alone_leaves_nothing_in_memory(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path
) -> None:
    publisher = make(tmp_path, alone, Transport.BROADCAST)
    writer, buckets = publisher.writer, FakeBuckets()
    writer.on_gpus = cast(GpuBuckets, buckets)
    writer.write(1)
    writer.state = {}  # as when the workers have it
    writer.release()
    wait_until(lambda: writer.store.newest() is not None, "the version on the volume")
    shutil.rmtree(writer.store.path(1))
    wait_until(lambda: not writer.is_on_volume(1), "the end of its write")
    publisher.keep_on_volume()
    assert not writer.state
    assert not buckets.is_filled
    writer.close()
    assert writer.store.newest() is not None


def test_a_volume_that_takes_no_version_is_a_lost_dependency(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make(tmp_path, alone, Transport.BROADCAST)
    may_end = threading.Event()
    monkeypatch.setattr(module, "write_version", lambda *_: may_end.wait(LIMIT_SECONDS))
    monkeypatch.setattr(module, "PUBLISH_SECONDS", 0.1)
    publisher.writer.write(0)
    time.sleep(0.2)
    with pytest.raises(DependencyLostError, match=r"not written to .*/policy after 0\.1 s"):
        publisher.writer.write(1)
    with structlog.testing.capture_logs() as logged:
        publisher.writer.close()
    assert [entry["event"] for entry in logged] == ["the last policy version is not on the volume"]
    may_end.set()


def test_a_slow_volume_delays_no_version_and_costs_the_memory_of_two(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path, alone, Transport.BROADCAST).writer
    live: weakref.WeakSet[Live] = weakref.WeakSet()
    most, may_end, written = 0, threading.Event(), []
    gather, write = module.gather_state, module.write_version

    class Live(dict[str, torch.Tensor]):
        __hash__ = object.__hash__

    def gathered(*args: Any, **options: Any) -> Live:
        nonlocal most
        state = Live(gather(*args, **options))
        live.add(state)
        most = max(most, len(live))
        return state

    def slow(store: PolicyStore, version: int, save: Any) -> None:
        assert may_end.wait(LIMIT_SECONDS)
        write(store, version, save)
        written.append(version)

    monkeypatch.setattr(module, "gather_state", gathered)
    monkeypatch.setattr(module, "write_version", slow)
    for version in range(4):
        writer.write(version)  # ends although no version is on the volume yet
        writer.state = {}  # as when the workers have it
        assert writer.store.newest_begun() == version, "a resumed run uses no number twice"
        assert writer.is_on_volume(version), "it will be there, so that workers wait for it"
    assert most == 2
    may_end.set()
    writer.close()
    assert written == [0, 3]
    assert [path.name for path in sorted(writer.store.policy_dir.iterdir())] == ["v000000", "v000003"]


@pytest.mark.parametrize(("kept", "while_writing"), [(1, [1]), (2, [1]), (3, [1, 2])])
def test_as_many_versions_as_are_kept_lie_on_the_volume_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, while_writing: list[int]
) -> None:
    """But one is always there to be read, even if only one is kept."""
    monkeypatch.setattr(module, "VERSIONS_KEPT", kept)
    store = PolicyStore(tmp_path / "policy")
    seen: list[int] = []

    def save(_: Path) -> None:
        seen[:] = [policy.version for policy in store.published()]

    for version in [*range(max(while_writing) + 1), 9]:
        write_version(store, version, save)
    assert seen == while_writing
    assert [policy.version for policy in store.published()] == [*while_writing, 9][-kept:]


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of the test's parameter, within the test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True, ids=oct)
@pytest.mark.parametrize("rank", [0, 2])
def test_everything_that_a_run_writes_of_its_model_follows_the_umask(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, umask: int, rank: int
) -> None:
    model = save_model(tmp_path / "model", FAMILIES["qwen2"])
    fields = {"shared_dir": tmp_path, "run_id": "r", "compute_type": "float32", "lora_rank": rank}
    settings = TrainerSettings.load(model_name=str(model), advantage="gae", critic="own", **fields)
    learner = make_learner(alone[0], model, **fields, advantage="gae", critic="own")
    writer = VersionWriter(settings, learner.policy, alone[0])
    writer.write(1)
    writer.close()
    saving.save_pretrained(learner.policy, alone[0], settings.run_dir / "model", Rounding(torch.float32))
    CriticLearner(learner).save(settings.run_dir / "critic")
    files = [file for file in settings.run_dir.rglob("*") if file.is_file()]
    assert [file.name for file in files if file.suffix == ".safetensors"] != []
    assert len({file.parent for file in files if file.suffix == ".safetensors"}) == 3
    assert {oct(stat.S_IMODE(file.stat().st_mode)) for file in files} == {oct(0o666 & ~umask)}


@pytest.mark.parametrize(
    ("publish_type", "compute_type"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_the_saved_model_is_the_last_published_version_byte_for_byte(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, publish_type: str, compute_type: str
) -> None:
    model = save_model(tmp_path / "model", FAMILIES["qwen2"])
    settings = {"compute_type": compute_type, "publish_type": publish_type}
    learner = make_learner(alone[0], model, shared_dir=tmp_path, run_id="r", **settings)
    writer = VersionWriter(learner.settings, learner.policy, alone[0])
    change(learner.policy, 1e-4)
    writer.write(1)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 2, alone[0])
    RankCalls(learner.settings, alone[0], learner, writer, checkpoints).save_model()
    saved = (learner.settings.run_dir / "model" / "model.safetensors").read_bytes()
    assert saved == (writer.store.path(1) / "model.safetensors").read_bytes()
    if publish_type == "float32":
        with learner.policy.masters.in_place():
            masters = dict(learner.policy.full_parameters(Rounding(torch.float32)))
            assert all(torch.equal(value, masters[name]) for name, value in safetensors.torch.load(saved).items())


def test_the_share_of_the_change_that_is_published_is_a_metric(
    alone: tuple[Ranks, ServiceThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make(tmp_path, alone)
    answer_for_workers(publisher, {"workers": 1.0}, monkeypatch)
    assert publisher.publish(0) == {"workers": 1.0}, "nothing is trained yet"
    change(publisher.writer.policy, 1e-2)
    metrics = publisher.publish(1)
    assert metrics["publish_share"] == pytest.approx(1, abs=0.01)
