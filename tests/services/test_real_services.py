"""The three services on real ports: the calls of the stock SkyPilot example, and what services tell and import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.core.endpoints import Endpoint
from services.data_server.app import create_app as data_server
from services.data_server.settings import DataSettings
from services.replay_buffer.app import create_app as replay_buffer
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.app import create_app as reward_server
from services.reward_server.settings import RewardSettings
from tests.services.run_page.serving import served_ready
from tests.waiting import IDLE_SECONDS


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of a data-server, a reward-server and a replay-buffer."""
    directory = tmp_path_factory.mktemp("services")
    cache = {"shared_dir": directory, "hf_datasets_cache": directory / "cache"}
    apps = {
        "data": data_server(DataSettings(dataset="arithmetic", **cache)),
        "reward": reward_server(RewardSettings(reward_workers=2)),
        "replay": replay_buffer(ReplaySettings(replay_dir=directory / "replay")),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(served_ready(app)) for name, app in apps.items()}


def endpoint(url: str) -> Endpoint:
    return Endpoint("127.0.0.1", int(url.rpartition(":")[2]))


def test_the_calls_of_the_stock_example_work_unchanged(urls: dict[str, str], tmp_path: Path) -> None:
    empty = replay_buffer(ReplaySettings(replay_dir=tmp_path))
    with served_ready(empty) as replay, httpx.Client(timeout=IDLE_SECONDS, trust_env=False) as client:
        for url in (urls["data"], urls["reward"], replay):
            assert client.get(f"{url}/health").json()["status"] == "healthy"

        prompts = client.get(f"{urls['data']}/prompts", params={"batch_size": 4}).json()["prompts"]
        assert len(prompts) == 4
        assert all(isinstance(prompt["prompt"], str) and prompt["ground_truth"] for prompt in prompts)

        right = {"prompt": "q", "response": "so the answer is 4", "ground_truth": "4"}
        wrong = {**right, "response": "it is 5"}
        assert client.post(f"{urls['reward']}/reward", json=right).json()["reward"] == 1.0
        scored = client.post(f"{urls['reward']}/batch_reward", json={"items": [right, wrong]}).json()
        assert [reward["reward"] for reward in scored["rewards"]] == [1.0, 0.0]

        experiences = [
            {"prompt": f"q{i}", "response": "r", "reward": float(i % 2), "ground_truth": "4", "step": i}
            for i in range(6)
        ]
        added = client.post(f"{replay}/add", json={"experiences": experiences}).json()
        assert added["size"] == 6
        sampled = client.post(f"{replay}/sample", json={"batch_size": 4, "prioritized": True}).json()
        assert len(sampled["experiences"]) == 4
        assert all(experience in experiences for experience in sampled["experiences"])
        stats = client.get(f"{replay}/stats").json()
        assert stats["size"] == 6
        assert stats["capacity"] == 100_000


async def test_every_service_tells_its_clients_what_it_runs_with(urls: dict[str, str]) -> None:
    told = {}
    for name, kind in (("data", DataClient), ("reward", RewardClient), ("replay", ReplayClient)):
        async with kind(endpoint(urls[name])) as client:
            told[name] = await client.settings()
    assert (told["data"].settings["dataset"], "dataset" in told["data"].changed) == ("arithmetic", True)
    assert (told["reward"].settings["reward_fn"], "reward_fn" in told["reward"].changed) == ("math", False)
    assert "replay_dir" in told["replay"].settings


HEAVY = ("torch", "transformers", "sympy", "datasets", "pandas")
SERVICES = ("data_server", "reward_server", "replay_buffer", "gateway", "environment_server", "evaluation_head")
PARTS = [
    (["local_runner.run"], (*HEAVY, "httpx", "structlog")),
    (["trainer.__main__"], (*HEAVY, "httpx")),
    (["services.rollout_server.__main__", "services.clients", "trainer.collector"], HEAVY),
    ([f"services.{service}.app" for service in SERVICES], HEAVY),
]
IMPORTS = """
import importlib, sys
for modules, absent in {parts}:
    for module in modules:
        importlib.import_module(module)
        assert not [name for name in absent if name in sys.modules], (module, absent, list(sys.modules))
"""
LOAD = """
import sys
from services.data_server.dataset import load
from services.data_server.settings import DataSettings
load(DataSettings(dataset="arithmetic", model_name={model!r}), own_process=True)
assert "torch" not in sys.modules
"""


def run(code: str) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_what_starts_beside_the_trainer_imports_little() -> None:
    run(IMPORTS.format(parts=PARTS))


def test_a_data_server_loads_rows_without_torch(tiny_model: Path) -> None:
    run(LOAD.format(model=str(tiny_model)))
