"""The loads of the benchmark of a large job group: each reaches what it measures, and to its end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import uvloop

from benchmarks import cluster
from benchmarks.quick_engine import LOAD_SECONDS
from benchmarks.rollout_tier import ENGINE_SECONDS, rollout_tier, write_model
from benchmarks.services import write_rows
from services.core.endpoints import ENDPOINTS_VARIABLE
from services.data_server.app import create_app as data_server
from services.data_server.settings import DataSettings
from services.replay_buffer.app import create_app as replay_buffer
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.app import create_app as reward_server
from services.reward_server.settings import RewardSettings
from tests.services.run_page.serving import served_ready

pytestmark = pytest.mark.leaving


def test_calls_and_versions_reach_all_engines_behind_the_real_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "{}")  # publish() sets it
    write_model(model := tmp_path / "model")
    with rollout_tier(model, 3) as tier:
        assert uvloop.run(tier.register()) > 0
        milliseconds = uvloop.run(tier.call(6, 1))
        assert len(milliseconds) == 6
        assert min(milliseconds) >= 1e3 * ENGINE_SECONDS
        figures = {figure.load: figure.value for figure in cluster.publish(model, tmp_path, tier.address, 3, 1)}
        assert figures["until all serve a version"] >= LOAD_SECONDS
        versions = [httpx.get(f"http://127.0.0.1:{port}/model_info").json()["weight_version"] for port in tier.engines]
        assert versions == ["2"] * 3


def test_the_trainer_takes_every_group_of_all_collectors(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 20)
    apps = {
        "data_server": data_server(DataSettings(dataset=str(rows), hf_datasets_cache=tmp_path / "cache")),
        "reward_server": reward_server(RewardSettings(reward_fn="math")),
        "replay_buffer": replay_buffer(ReplaySettings(replay_dir=tmp_path / "replay")),
    }
    with ExitStack() as stack:
        urls = {name: stack.enter_context(served_ready(app)) for name, app in apps.items()}
        load = cluster.Collectors({name: int(url.rpartition(":")[2]) for name, url in urls.items()}, 3, 4)
        assert uvloop.run(load.run()) > 0
        stats = httpx.get(f"{urls['replay_buffer']}/stats").json()
    assert {name: len(each) for name, each in load.milliseconds.items()} == dict.fromkeys(load.milliseconds, 12)
    assert list(load.milliseconds) == ["a prompt", "8 rewards", "a group queued"]
    assert (stats["groups"], stats["waiting"], stats["leased"]) == (12, 0, 0)


def test_every_token_of_a_step_is_packed() -> None:
    figures = {figure.load: figure.value for figure in cluster.in_process(cluster.packing_figures, 16)}
    prompts, completions = 2 * 80, 16 * 20 * 400
    assert round(1e6 * figures["tokens, packed"]) >= prompts + completions - 16
