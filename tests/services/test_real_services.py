"""The three services on real ports: the calls of the stock SkyPilot example, and our own clients."""

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
from services.http.client import RequestRefusedError
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor, Split
from services.protocol.replay import AcknowledgeRequest, LeaseRequest, SampleGroupsRequest
from services.protocol.rewards import RewardItem
from services.replay_buffer.app import create_app as replay_buffer
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.app import create_app as reward_server
from services.reward_server.settings import RewardSettings
from tests.sequences import make_group
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


async def test_the_data_client_walks_a_cursor_and_an_epoch_has_each_prompt_once(urls: dict[str, str]) -> None:
    async with DataClient(endpoint(urls["data"])) as data:
        await data.wait_healthy(IDLE_SECONDS)
        cursor, seen = Cursor(), []
        while cursor.epoch == 0:
            batch = await data.prompts(8, cursor=cursor)
            seen += [prompt.id for prompt in batch.prompts if prompt.epoch == 0]
            cursor = batch.cursor
        assert sorted(seen) == sorted(set(seen))
        assert len(seen) == batch.total_available == (await data.stats()).train_prompts
        held_out = await data.prompts(4096, Split.TEST, Cursor())
        assert held_out.cursor == Cursor(epoch=1, position=0)
        assert {p.prompt for p in held_out.prompts}.isdisjoint(seen)
        first = await data.prompts(4, consumer="someone")
        second = await data.prompts(4, consumer="someone")
        assert [p.position for p in first.prompts + second.prompts] == list(range(8))


async def test_the_reward_client_scores_in_order_over_several_requests(urls: dict[str, str]) -> None:
    items = [RewardItem(prompt="", response=f"#### {i}", ground_truth=str(i - i % 2)) for i in range(2500)]
    async with RewardClient(endpoint(urls["reward"])) as rewards:
        results = await rewards.score(items)
    assert [result.reward for result in results] == [float(i % 2 == 0) for i in range(2500)]


def group_named(name: str) -> Group:
    sequence = TokenSequence(
        completion="4",
        completion_ids=[3, 1],
        logprobs=[-0.25, -0.125],
        policy_versions=[2, 2],
        finish_reason="stop",
        result={"reward": 1.0},
    )
    return make_group(group_id=name, prompt="2 + 2?", ground_truth="4", prompt_ids=[1, 2], sequences=[sequence] * 2)


async def test_the_replay_client_reaches_every_route(urls: dict[str, str]) -> None:
    groups = [group_named(f"client-{i}") for i in range(70)]
    async with ReplayClient(endpoint(urls["replay"])) as replay:
        assert (await replay.add(groups, [1.0] * 70)).added == 70
        assert (await replay.add(groups[:3])).duplicates == 3
        sampled = await replay.sample(SampleGroupsRequest(batch_size=5, seed=1))
        assert all(s.group in groups for s in sampled)
        assert (await replay.update_priorities({"client-0": 3.0, "unheard": 1.0})).unknown == 1
        assert (await replay.save_snapshot("a")).groups == 70
        assert (await replay.enqueue([group_named("fresh-0"), group_named("fresh-1")])).size == 2
        lease = await replay.lease(LeaseRequest(max_groups=2, wait_seconds=5))
        assert [group.group_id for group in lease.groups] == ["fresh-0", "fresh-1"]
        assert (await replay.acknowledge(AcknowledgeRequest(lease_id=lease.lease_id or ""))).acknowledged == 2
        assert (await replay.stats()).groups == 72
        assert (await replay.restore_snapshot("a")).groups == 70
        assert (await replay.stats()).groups == 70
        assert (await replay.drop_snapshot("a")).groups == 70
        assert (await replay.drop_snapshot("a")).groups == 0
        with pytest.raises(RequestRefusedError) as refusal:
            await replay.restore_snapshot("a")
        assert refusal.value.status == 404


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
