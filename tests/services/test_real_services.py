"""The three services as processes: the calls of the stock SkyPilot example, and our own clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.core.endpoints import Endpoint
from services.http.client import RequestRefusedError
from services.protocol.groups import Completion, Experience, Group
from services.protocol.prompts import Cursor, Split
from services.protocol.replay import AcknowledgeRequest, LeaseRequest, SampleGroupsRequest
from services.protocol.rewards import RewardItem
from tests.waiting import IDLE_SECONDS, wait_until


@pytest.fixture(scope="module")
def services(start_service_once: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "data": start_service_once("services.data_server", DATASET="arithmetic", healthy=False),
        "reward": start_service_once("services.reward_server", healthy=False),
        "replay": start_service_once("services.replay_buffer", healthy=False),
    }


@pytest.fixture
def healthy(services: dict[str, Any]) -> dict[str, Any]:
    for service in services.values():
        service.wait_healthy()
    return services


def endpoint(service: Any) -> Endpoint:
    return Endpoint("127.0.0.1", service.port)


def test_the_calls_of_the_stock_example_work_unchanged(healthy: dict[str, Any]) -> None:
    with httpx.Client(timeout=IDLE_SECONDS, trust_env=False) as client:
        for service in healthy.values():
            assert client.get(f"{service.url}/health").json()["status"] == "healthy"

        prompts = client.get(f"{healthy['data'].url}/prompts", params={"batch_size": 4}).json()["prompts"]
        assert len(prompts) == 4
        assert all(isinstance(prompt["prompt"], str) and prompt["ground_truth"] for prompt in prompts)

        right = {"prompt": "q", "response": "so the answer is 4", "ground_truth": "4"}
        wrong = {**right, "response": "it is 5"}
        assert client.post(f"{healthy['reward'].url}/reward", json=right).json()["reward"] == 1.0
        scored = client.post(f"{healthy['reward'].url}/batch_reward", json={"items": [right, wrong]}).json()
        assert [reward["reward"] for reward in scored["rewards"]] == [1.0, 0.0]

        experiences = [
            {"prompt": f"q{i}", "response": "r", "reward": float(i % 2), "ground_truth": "4", "step": i}
            for i in range(6)
        ]
        added = client.post(f"{healthy['replay'].url}/add", json={"experiences": experiences}).json()
        assert added["size"] == 6
        sampled = client.post(f"{healthy['replay'].url}/sample", json={"batch_size": 4, "prioritized": True}).json()
        assert len(sampled["experiences"]) == 4
        assert all(experience in experiences for experience in sampled["experiences"])
        stats = client.get(f"{healthy['replay'].url}/stats").json()
        assert stats["size"] == 6
        assert stats["capacity"] == 100_000


async def test_every_service_tells_its_clients_what_it_runs_with(healthy: dict[str, Any]) -> None:
    told = {}
    for name, kind in (("data", DataClient), ("reward", RewardClient), ("replay", ReplayClient)):
        async with kind(endpoint(healthy[name])) as client:
            told[name] = await client.settings()
    assert (told["data"].settings["dataset"], "dataset" in told["data"].changed) == ("arithmetic", True)
    assert (told["reward"].settings["reward_fn"], "reward_fn" in told["reward"].changed) == ("math", False)
    assert "replay_capacity" in told["replay"].settings


async def test_the_data_client_walks_a_cursor_and_an_epoch_has_each_prompt_once(healthy: dict[str, Any]) -> None:
    async with DataClient(endpoint(healthy["data"])) as data:
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


async def test_the_reward_client_scores_in_order_over_several_requests(healthy: dict[str, Any]) -> None:
    items = [RewardItem(prompt="", response=f"#### {i}", ground_truth=str(i - i % 2)) for i in range(2500)]
    async with RewardClient(endpoint(healthy["reward"])) as rewards:
        results = await rewards.score(items)
    assert [result.reward for result in results] == [float(i % 2 == 0) for i in range(2500)]


def make_group(name: str) -> Group:
    completion = Completion(
        completion="4",
        completion_ids=[3, 1],
        logprobs=[-0.25, -0.125],
        policy_versions=[{"version": 2, "start": 0, "end": 2}],
        finish_reason="stop",
    )
    experience = Experience(**completion.model_dump(), result={"reward": 1.0})
    return Group(group_id=name, prompt="2 + 2?", ground_truth="4", prompt_ids=[1, 2], experiences=[experience] * 2)


async def test_the_replay_client_reaches_every_route(healthy: dict[str, Any]) -> None:
    groups = [make_group(f"client-{i}") for i in range(70)]
    async with ReplayClient(endpoint(healthy["replay"])) as replay:
        assert (await replay.add(groups, [1.0] * 70)).added == 70
        assert (await replay.add(groups[:3])).duplicates == 3
        sampled = await replay.sample(SampleGroupsRequest(batch_size=5, seed=1))
        assert all(s.group in groups for s in sampled)
        assert (await replay.update_priorities({"client-0": 3.0, "unheard": 1.0})).unknown == 1
        assert (await replay.save_snapshot("a")).groups == 70
        assert (await replay.enqueue([make_group("fresh-0"), make_group("fresh-1")])).size == 2
        lease = await replay.lease(LeaseRequest(max_groups=2, wait_seconds=5))
        assert [group.group_id for group in lease.groups] == ["fresh-0", "fresh-1"]
        assert (await replay.acknowledge(AcknowledgeRequest(lease_id=lease.lease_id or ""))).acknowledged == 2
        assert (await replay.stats()).groups == 72
        assert (await replay.restore_snapshot("a")).groups == 70
        assert (await replay.stats()).groups == 70
        assert (await replay.drop_snapshot("a")).groups == 70
        assert (await replay.drop_snapshot("a")).groups == 0
        with pytest.raises(RequestRefusedError, match="404 there is no snapshot 'a'"):
            await replay.restore_snapshot("a")


async def test_a_lease_that_waits_does_not_hold_up_the_end(start_service: Any) -> None:
    service = start_service("services.replay_buffer")
    async with httpx.AsyncClient(base_url=service.url, timeout=IDLE_SECONDS, trust_env=False) as client:
        body = {"max_groups": 1, "wait_seconds": 60}
        waiting = asyncio.create_task(client.post("/queue/lease", json=body))
        async with asyncio.timeout(IDLE_SECONDS):
            # The request for the metrics is one of the two.
            while 'in_flight{service="replay-buffer"} 2.0' not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(service.terminate) == 0
        assert (await waiting).json()["lease_id"] is None


def test_a_worker_in_the_middle_of_an_answer_ends_with_a_killed_reward_server(
    start_service: Any, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    function = (
        f"import pathlib, time\n\ndef f(response):\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(3600)\n"
    )
    (tmp_path / "slow_reward.py").write_text(function)
    service = start_service("services.reward_server", REWARD_FN="slow_reward:f", PYTHONPATH=str(tmp_path))
    workers = psutil.Process(service.process.pid).children(recursive=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{service.url}/reward",
            json={"prompt": "", "response": "", "ground_truth": ""},
            trust_env=False,
            timeout=0.5,
        )
    wait_until(begun.exists, "the worker begins")
    service.kill()
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in workers), "all have ended"
    )


HEAVY = ("torch", "transformers", "sympy", "datasets", "pandas")
SERVICES = ("data_server", "reward_server", "replay_buffer", "gateway", "environment_server", "evaluation_head")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ([f"services.{service}.app" for service in SERVICES], HEAVY),
        (["services.rollout_server.__main__", "services.clients", "trainer.collector"], HEAVY),
        (["trainer.__main__"], (*HEAVY, "httpx")),
        (["local_runner.run"], (*HEAVY, "httpx", "structlog")),
    ],
    ids=["services", "rollout-server, clients and collectors", "the trainer's launcher", "the local runner"],
)
def test_what_starts_beside_the_trainer_imports_little(modules: list[str], absent: tuple[str, ...]) -> None:
    check = f"import sys, {', '.join(modules)}; sys.exit(str([name for name in {absent} if name in sys.modules] or ''))"
    ended = subprocess.run(
        [sys.executable, "-c", check], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, check=False
    )
    assert ended.stderr == b"\n"


def test_where_consumers_stand_survives_the_data_server(start_service: Any, tmp_path: Path) -> None:
    positions = []
    for _ in range(2):
        service = start_service("services.data_server", DATASET="arithmetic", SHARED_DIR=str(tmp_path), RUN_ID="r")
        reply = httpx.get(
            f"{service.url}/prompts", params={"batch_size": 3, "consumer": "c"}, timeout=IDLE_SECONDS, trust_env=False
        ).json()
        positions += [prompt["position"] for prompt in reply["prompts"]]
        service.kill()
    assert positions == list(range(6))
