"""The trainer's writer of deltas, and what a node's copy makes of them; workers and launchers are fakes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.core.endpoints import ENDPOINTS_VARIABLE, ROUTER_PORT
from services.core.errors import ConfigurationError
from services.core.files import CHANGES_FILE
from services.core.tasks import ServiceThread
from services.engines.engine import WorkerRefusedError
from services.engines.router import LAUNCHER_LABEL
from services.engines.sglang import SGLang
from services.weights.deltas import ModelCopy
from services.weights.policy_store import PolicyStore, is_delta
from tests.fake_service import fake_service
from tests.trainer.rank_jobs import change
from tests.trainer.tiny import FAMILIES, save_model
from tests.waiting import IDLE_SECONDS
from trainer.config import TrainerSettings
from trainer.model import saving
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.saving import DiskFullError
from trainer.publishing import deltas as module
from trainer.publishing.publisher import Publisher, VersionWriter
from trainer.reporting.step_metrics import headline

pytestmark = pytest.mark.leaving

Alone = tuple[Ranks, ServiceThread]

SMALL, LARGE = 1e-5, 1e-1
"""Moves of all weights, of which a small one changes few in bfloat16 and a large one changes all."""


@pytest.fixture
def alone() -> Iterator[Alone]:
    with join_ranks() as ranks, ServiceThread() as thread:
        yield ranks, thread


def make(directory: Path, alone: Alone, **fields: Any) -> VersionWriter:
    model = save_model(directory / "model", FAMILIES["qwen3_moe"])
    chosen: dict[str, Any] = {"shared_dir": directory, "run_id": "r", "compute_type": "float32", "publish_delta": True}
    settings = TrainerSettings.load(model_name=str(model), **(chosen | fields))
    return VersionWriter(settings, load_policy(settings, alone[0]), alone[0])


def forms(store: PolicyStore) -> dict[int, bool]:
    return {policy.version: is_delta(policy.path) for policy in store.published()}


def test_a_node_that_follows_has_the_bytes_of_whole_versions(alone: Alone, tmp_path: Path) -> None:
    writer, whole = make(tmp_path / "a", alone), make(tmp_path / "b", alone, publish_delta=False)
    copy = ModelCopy(writer.store, tmp_path / "copy")
    for version in range(6):
        for each in (writer, whole):
            each.write(version)
            change(each.policy, SMALL)
        copy.become(writer.store.record(version))
        wanted = whole.store.path(version)
        assert {path.name for path in wanted.iterdir()} <= {path.name for path in copy.path.iterdir()}
        for path in wanted.iterdir():
            assert path.read_bytes() == (copy.path / path.name).read_bytes(), path.name
    assert forms(writer.store) == {0: False, **dict.fromkeys(range(1, 6), True)}, "the anchor stays"


def test_the_step_says_how_much_less_a_delta_is(alone: Alone, tmp_path: Path) -> None:
    writer = make(tmp_path, alone)
    writer.write(0)
    assert writer.metrics["publish_bytes"] == writer.metrics["publish_whole_bytes"] > 0
    change(writer.policy, SMALL)
    writer.write(1)
    size = (writer.store.path(1) / CHANGES_FILE).stat().st_size
    assert 0 < writer.metrics["publish_bytes"] <= size < writer.metrics["publish_whole_bytes"] / 2
    before, after = (load_file(path / "model.safetensors") for path in copies(writer.store, tmp_path, (0, 1)))
    changed = sum(int((before[name] != after[name]).sum()) for name in before)
    assert writer.metrics["publish_changed"] == pytest.approx(changed / sum(map(torch.numel, after.values())), abs=1e-3)
    assert headline(writer.metrics)["published"].endswith("MB")


def copies(store: PolicyStore, directory: Path, versions: tuple[int, ...]) -> list[Path]:
    """Returns a copy of each version, made from its anchor."""
    made = [ModelCopy(store, directory / f"copy-{version}") for version in versions]
    for version, copy in zip(versions, made, strict=True):
        copy.become(store.record(version))
    return [copy.path for copy in made]


def test_a_new_anchor_is_due_when_the_deltas_since_have_more_bytes_than_a_whole_version(
    alone: Alone, tmp_path: Path
) -> None:
    writer = make(tmp_path, alone)
    read = 0.0
    for version in range(60):
        writer.write(version)
        is_anchor = not is_delta(writer.store.path(version))
        read = writer.metrics["publish_bytes"] + (0 if is_anchor else read)
        assert read <= 2 * writer.metrics["publish_whole_bytes"], "which is the most that a late node reads"
        if version and is_anchor:
            break
        change(writer.policy, SMALL)
    assert version > 2
    writer.write(version + 1)
    writer.write(version + 2)
    assert forms(writer.store) == {version: False, version + 1: True, version + 2: True}
    change(writer.policy, LARGE)
    writer.write(version + 3)
    assert not is_delta(writer.store.path(version + 3))


def test_many_small_deltas_have_an_anchor_now_and_then(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_DELTAS", 2)
    writer = make(tmp_path, alone)
    whole = []
    for version in range(8):
        writer.write(version)
        whole += [] if is_delta(writer.store.path(version)) else [version]
    assert whole == [0, 3, 6]


def test_a_version_that_is_written_again_or_has_lost_its_base_is_whole(alone: Alone, tmp_path: Path) -> None:
    writer = make(tmp_path, alone)
    writer.write(1)
    writer.write(2)
    writer.write(2)
    assert not is_delta(writer.store.path(2))
    writer.write(3)
    writer.store.remove(2)
    writer.write(4)
    assert forms(writer.store)[4] is False


def test_what_the_disk_did_not_take_is_in_the_next_version(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path, alone)
    copy = ModelCopy(writer.store, tmp_path / "copy")
    writer.write(0)
    copy.become(writer.store.record(0))
    change(writer.policy, SMALL)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fail)
        with pytest.raises(DiskFullError):
            writer.write(1)
    writer.write(2)
    assert forms(writer.store) == {0: False, 2: True}
    copy.become(writer.store.record(2))
    saving.save_pretrained(writer.policy, alone[0], tmp_path / "saved", writer.rounding)
    saved, copied = (path / "model.safetensors" for path in (tmp_path / "saved", copy.path))
    assert saved.read_bytes() == copied.read_bytes()


def test_a_resumed_run_begins_with_an_anchor(alone: Alone, tmp_path: Path) -> None:
    for _ in range(2):
        writer = make(tmp_path, alone)
        writer.store.discard_after(1)
        for version in range(1, 4):
            writer.write(version)
        assert forms(writer.store) == {1: False, 2: True, 3: True}


class Tier:
    """A router, a worker and its launcher, which copies versions as a real one; versions are what the worker loaded."""

    def __init__(self, directory: Path, writer: VersionWriter, stack: ExitStack, *, has_launcher: bool = True) -> None:
        self.store = writer.store
        self.copy = ModelCopy(self.store, directory / "copy")
        self.asked: list[str] = []
        self.served = 0
        self.is_registered = True
        worker, launcher = stack.enter_context(fake_service({})), stack.enter_context(fake_service({}))
        for route in ("begin_weight_update", "end_weight_update", "pause_generation", "continue_generation"):
            worker.routes[f"POST /{route}"] = lambda _: self.asked.append("held") or {}
        worker.routes |= {
            "POST /update_weights_from_disk": self.load,
            "GET /model_info": lambda _: {"weight_version": str(self.served)},
        }
        launcher.routes["DELETE /versions"] = lambda _: self.asked.append("taken back") or {}
        launcher.routes |= {f"POST /versions/{version}": self.fetch for version in range(9)}
        labels = {LAUNCHER_LABEL: launcher.endpoint.url} if has_launcher else {}
        entry = {"id": "w", "url": worker.endpoint.url, "is_healthy": True, "metadata": labels}
        routes = {"GET /workers": lambda _: {"workers": [entry]}, "DELETE /workers/w": lambda _: {}}
        router = stack.enter_context(fake_service(routes))
        self.endpoints = {f"rollout-server-0:{ROUTER_PORT}": f"{router.endpoint.host}:{router.endpoint.port}"}

    def fetch(self, _: dict[str, Any]) -> Any:
        newest = self.store.newest()
        assert newest is not None
        self.asked.append("fetch")
        self.copy.become(self.store.record(newest.version))
        return {"path": str(self.copy.path)}

    def load(self, request: dict[str, Any]) -> Any:
        self.asked.append(Path(request["model_path"]).name)
        self.served = int(request["weight_version"])
        return {"success": True}


def test_a_worker_is_paused_once_its_node_has_the_version(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path, alone)
    with ExitStack() as stack:
        tier = Tier(tmp_path, writer, stack)
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(tier.endpoints))
        publisher = Publisher(writer.settings, alone[1], writer)
        publisher.publish(1)
        assert publisher.publish(2)["workers"] == 1
    order = [tier.asked.index(name) for name in ("fetch", "held", "copy", "taken back")]
    assert order == sorted(order)
    assert tier.served == 2


def test_a_rollout_server_without_the_setting_ends_the_run_with_what_to_do(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path, alone)
    with ExitStack() as stack:
        tier = Tier(tmp_path, writer, stack, has_launcher=False)
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(tier.endpoints))
        with pytest.raises(ConfigurationError, match="give rollout-server the same PUBLISH_DELTA as ppo-trainer"):
            Publisher(writer.settings, alone[1], writer).publish(1)


async def test_a_launcher_that_does_not_answer_is_asked_to_take_its_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    may_end = threading.Event()
    taken_back: list[bool] = []
    routes = {
        "POST /versions/3": lambda _: may_end.wait(IDLE_SECONDS) and {},
        "DELETE /versions": lambda _: taken_back.append(True) or {},
    }
    with fake_service(routes) as launcher:
        form = module.NodesCopy(3, None, seconds=0.1)
        async with SGLang("http://127.0.0.1:1", timeout=1) as worker:
            worker.launcher = launcher.endpoint.url
            named = rf"{worker.launcher} did not answer /versions/3 within 0\.3 s.*rollout-server's launcher .*its log"
            with pytest.raises(WorkerRefusedError, match=named):
                await form.fetch(worker)
        await form.close()
        may_end.set()
    assert taken_back == [True]


async def test_the_end_of_a_publication_waits_for_no_launcher_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKE_BACK_SECONDS", 0.2)
    may_end = threading.Event()
    with fake_service({"DELETE /versions": lambda _: may_end.wait(IDLE_SECONDS) and {}}) as launcher:
        async with asyncio.timeout(IDLE_SECONDS / 2):
            await module.NodesCopy(3, None, seconds=IDLE_SECONDS, launchers={launcher.endpoint.url}).close()
        may_end.set()
