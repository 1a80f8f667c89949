"""Two dozen collectors at one data-server and one replay-buffer; engines and rewards are fakes.

The test has the trainer's part: it takes the groups. The engines answer when it says so.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.core.endpoints import Endpoint, Task
from services.data_server.app import create_app as data_server
from services.data_server.settings import DataSettings
from services.protocol.replay import AcknowledgeRequest, LeaseRequest
from services.replay_buffer.app import create_app as replay_buffer
from services.replay_buffer.settings import ReplaySettings
from tests.fake_service import fake_service
from tests.rows import write_rows
from tests.services.run_page.serving import served_ready
from tests.waiting import IDLE_SECONDS, Deadline, eventually
from trainer.collector import ADMISSION_SECONDS, Collector
from trainer.config import TrainerSettings
from trainer.rollouts.clients import Clients
from trainer.rollouts.groups import Completions, GroupMaker

COLLECTORS = 24
BATCH, STALENESS, EPOCHS = 4, 2, 2
BOUND = BATCH * STALENESS
QUESTIONS = 40
SETTINGS = {
    "mode": "async",
    "batch_size": BATCH,
    "max_staleness": STALENESS,
    "num_epochs": EPOCHS,
    "group_size": 2,
    "max_new_tokens": 4,
    "run_id": "many",
}


class Engine:
    """A fake engine that answers while it is open, and counts the prompts that it has at once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.most_at_once = 0
        self.at_once = 0
        self._lock = threading.Lock()

    def generate(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.open.wait(IDLE_SECONDS)
        time.sleep(0.01)
        with self._lock:
            self.at_once -= 1
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-0.5, 3, None]]}
        return [{"text": "x", "output_ids": [3], "meta_info": meta}] * request["sampling_params"]["n"]


class World:
    """The services, and the collectors by their number, as tasks that share their clients."""

    def __init__(self, endpoints: dict[Task, Endpoint], directory: Path) -> None:
        self._at = endpoints
        self._settings = TrainerSettings.load(**SETTINGS, shared_dir=directory)
        rewards = RewardClient(endpoints[Task.REWARD_SERVER])
        rollouts = RolloutClient(endpoints[Task.ROLLOUT_SERVER], vocab_size=10_000, deadline_seconds=IDLE_SECONDS)
        self._clients = Clients(
            DataClient(endpoints[Task.DATA_SERVER]),
            rewards,
            ReplayClient(endpoints[Task.REPLAY_BUFFER]),
            rollouts,
            {"": Completions(self._settings, rollouts, rewards)},
        )
        self.data, self.replay = self._clients.data, self._clients.replay
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> World:
        await self._clients.open()
        await self._clients.wait_healthy(IDLE_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in self._tasks:
            await self.kill(number)
        await self._clients.close()

    def start(self, number: int) -> None:
        maker = GroupMaker(self._settings, self._clients.samplers[""])
        self._tasks[number] = asyncio.create_task(Collector(self._settings, self._clients, maker, number).run())

    async def kill(self, number: int) -> None:
        self._tasks[number].cancel()
        await asyncio.wait([self._tasks[number]])

    async def succeeded(self, number: int) -> bool:
        """Wait for a collector's end and return whether it ended well."""
        await asyncio.wait([self._tasks[number]])
        return self._tasks[number].exception() is None

    async def admission_requests(self) -> float:
        """Return the number of requests for admission that the replay-buffer has answered."""
        async with httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as client:
            metrics = (await client.get(f"{self._at[Task.REPLAY_BUFFER].url}/metrics")).text
        found = re.findall(r'^http_requests_total\{[^}]*route="/queue/admission"[^}]*\} (\S+)$', metrics, re.MULTILINE)
        return sum(map(float, found))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def endpoints(
    engine: Engine, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Task, Endpoint]]:
    directory = tmp_path_factory.mktemp("services")
    rewards = {
        "GET /health": lambda _: {"status": "healthy"},
        "POST /batch_reward": lambda request: {"rewards": [{"reward": 1.0} for _ in request["items"]]},
    }
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(QUESTIONS)]
    own = {
        "dataset": str(write_rows(directory / "rows.jsonl", rows)),
        "dataset_test": write_rows(directory / "test.jsonl", [{"question": "99+1=", "answer": "100"}]),
        "instruction": "none",
        "prompt_style": "plain",
        "model_name": str(tiny_model),
        "hf_datasets_cache": directory / "cache",
    }
    apps = {
        Task.DATA_SERVER: data_server(DataSettings(**own)),
        Task.REPLAY_BUFFER: replay_buffer(ReplaySettings(replay_dir=directory / "replay")),
    }
    with ExitStack() as stack:
        fakes = {Task.ROLLOUT_SERVER: {"POST /generate": engine.generate}, Task.REWARD_SERVER: rewards}
        made = {task: stack.enter_context(fake_service(routes)).endpoint for task, routes in fakes.items()}
        for task, app in apps.items():
            url = stack.enter_context(served_ready(app))
            made[task] = Endpoint("127.0.0.1", int(url.rpartition(":")[2]))
        stack.callback(engine.open.set)
        yield made


async def test_two_dozen_collectors_take_every_prompt_once_also_when_one_is_killed(
    endpoints: dict[Task, Endpoint], engine: Engine, tmp_path: Path
) -> None:
    """Collect all epochs; kill a collector and start it again while the engine answers nobody."""
    async with World(endpoints, tmp_path) as world:
        began = time.monotonic()
        asked_before = await world.admission_requests()
        for number in range(COLLECTORS):
            world.start(number)
        in_flight: dict[str, int] = {}

        async def all_places_are_taken() -> bool:
            in_flight.update((await world.replay.stats()).in_flight)
            return len(in_flight) == COLLECTORS and engine.at_once == BOUND

        await eventually(all_places_are_taken, "all collectors", progress=lambda: len(in_flight))
        # Collectors wait for room in a request that is held, not by asking often.
        most = COLLECTORS * (2 + (time.monotonic() - began) / ADMISSION_SECONDS) + BOUND
        requests = await world.admission_requests() - asked_before
        assert requests <= most, f"{requests:.0f} requests for admission of {COLLECTORS} collectors"
        killed, lost = next((int(name.split("-")[1]), prompts) for name, prompts in in_flight.items() if prompts)
        await world.kill(killed)
        world.start(killed)
        # The prompts of the killed one are still at the engine, too.
        await eventually(lambda: engine.at_once == BOUND + lost, "its prompts are generated again")
        engine.open.set()
        taken = await _take(world.replay)
        failed = [number for number in range(COLLECTORS) if not await world.succeeded(number)]
        assert not failed, f"collectors {failed} of {COLLECTORS} failed"
        assert (await world.replay.stats()).model_dump()["counts"]["duplicates"] == 0
        cursors = (await world.data.stats()).cursors
    assert sorted(taken) == [(epoch, position) for epoch in range(EPOCHS) for position in range(QUESTIONS)]
    assert engine.most_at_once <= BOUND + lost, f"{engine.most_at_once} prompts in flight, {lost} of them lost"
    assert {cursors[f"collector-{number}/train"]["epoch"] for number in range(COLLECTORS)} == {EPOCHS}


async def _take(replay: ReplayClient) -> list[tuple[int, int]]:
    """Return epoch and position of all groups, taken a batch at a time as the trainer does."""
    taken: list[tuple[int, int]] = []
    deadline = Deadline("all groups", progress=lambda: len(taken))
    while len(taken) < EPOCHS * QUESTIONS:
        deadline.check()
        reply = await replay.lease(LeaseRequest(max_groups=BATCH, wait_seconds=1))
        taken += [(group.prompt.epoch, group.prompt.position) for group in reply.groups]
        if reply.lease_id is not None:
            await replay.acknowledge(AcknowledgeRequest(lease_id=reply.lease_id, keep=False))
    return taken
