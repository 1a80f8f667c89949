"""Two dozen collectors at one data-server and one replay-buffer; engines and rewards are fakes.

The test has the trainer's part: it takes the groups. The engines answer when it says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.clients.data import DataClient
from services.clients.replay import ReplayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient
from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, Endpoint, Task
from services.protocol.replay import AcknowledgeRequest, LeaseRequest
from tests.fake_service import fake_service
from tests.services.conftest import REPOSITORY, StartService
from tests.waiting import IDLE_SECONDS, Deadline, bytes_in, eventually
from trainer.collector import ADMISSION_SECONDS, Collector
from trainer.config import TrainerSettings
from trainer.rollouts.clients import Clients
from trainer.rollouts.groups import Completions, GroupMaker

COLLECTORS = 24
BATCH, STALENESS, EPOCHS = 4, 2, 2
BOUND = BATCH * STALENESS
QUESTIONS = 80
"""Sums of one digit in the training split."""
SETTINGS = {
    "DATASET": "arithmetic",
    "PROMPT_STYLE": "plain",
    "MODE": "async",
    "BATCH_SIZE": str(BATCH),
    "MAX_STALENESS": str(STALENESS),
    "NUM_EPOCHS": str(EPOCHS),
    "GROUP_SIZE": "2",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPT_TOKENS": "64",
    "RUN_ID": "many",
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
    """The services, and the collectors by their number, each in a process of its own."""

    def __init__(self, endpoints: dict[Task, Endpoint], directory: Path, model: Path) -> None:
        self.endpoints = endpoints
        self.directory = directory
        self.variables = {**SETTINGS, "MODEL_NAME": str(model), "SHARED_DIR": str(directory)}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Start a collector."""
        mapped = {f"{task.value}-0:{PORTS[task][0]}": f"{at.host}:{at.port}" for task, at in self.endpoints.items()}
        place = {"SKYPILOT_NODE_RANK": str(number), ENDPOINTS_VARIABLE: json.dumps(mapped)}
        with (self.directory / f"{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [sys.executable, "-m", "trainer.collector"],
                cwd=REPOSITORY,
                env={**os.environ, **self.variables, **place},
                stdout=log,
                stderr=log,
            )

    async def kill(self, number: int) -> None:
        """End a collector without a chance to tidy up."""
        self._processes[number].kill()
        self._processes[number].wait(IDLE_SECONDS)

    async def succeeded(self, number: int) -> bool:
        """Wait for a collector's end and return whether it ended well."""
        await eventually(lambda: self._processes[number].poll() is not None, "its end")
        return self._processes[number].returncode == 0

    async def admission_requests(self) -> float:
        """Return the number of requests for admission that the replay-buffer has answered."""
        async with httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as client:
            metrics = (await client.get(f"{self.endpoints[Task.REPLAY_BUFFER].url}/metrics")).text
        found = re.findall(r'^http_requests_total\{[^}]*route="/queue/admission"[^}]*\} (\S+)$', metrics, re.MULTILINE)
        return sum(map(float, found))


class Tasks(World):
    """The collectors as tasks of this process, which share their clients: two dozen processes take long to start."""

    async def __aenter__(self) -> Tasks:
        at = self.endpoints
        self._settings = TrainerSettings.load(**{name.lower(): value for name, value in self.variables.items()})
        rewards = RewardClient(at[Task.REWARD_SERVER])
        rollouts = RolloutClient(at[Task.ROLLOUT_SERVER], vocab_size=10_000, deadline_seconds=IDLE_SECONDS)
        self._clients = Clients(
            DataClient(at[Task.DATA_SERVER]),
            rewards,
            ReplayClient(at[Task.REPLAY_BUFFER]),
            rollouts,
            {"": Completions(self._settings, rollouts, rewards)},
        )
        await self._clients.open()
        await self._clients.wait_healthy(IDLE_SECONDS)
        self._tasks: dict[int, asyncio.Task[None]] = {}
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
        await asyncio.wait([self._tasks[number]])
        return self._tasks[number].exception() is None


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def started(
    start_service: StartService, engine: Engine, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[dict[Task, Endpoint], Path, Path]]:
    """The services' endpoints, a directory, and the model."""
    rewards = {
        "GET /health": lambda _: {"status": "healthy"},
        "POST /batch_reward": lambda request: {"rewards": [{"reward": 1.0} for _ in request["items"]]},
    }
    with fake_service({"POST /generate": engine.generate}) as rollouts, fake_service(rewards) as scorer:
        endpoints = {Task.ROLLOUT_SERVER: rollouts.endpoint, Task.REWARD_SERVER: scorer.endpoint}
        for task in (Task.DATA_SERVER, Task.REPLAY_BUFFER):
            module = f"services.{task.value.replace('-', '_')}"
            service = start_service(module, healthy=False, MODEL_NAME=str(tiny_model), **SETTINGS)
            endpoints[task] = Endpoint("127.0.0.1", service.port)
        try:
            yield endpoints, tmp_path, tiny_model
        finally:
            engine.open.set()


async def test_two_dozen_collectors_take_every_prompt_once_also_when_one_is_killed(
    started: tuple[dict[Task, Endpoint], Path, Path], engine: Engine
) -> None:
    async with Tasks(*started) as world:
        await each_prompt_is_taken_once(world, engine)


@pytest.mark.slow
async def test_two_dozen_collector_processes_take_every_prompt_once(
    started: tuple[dict[Task, Endpoint], Path, Path], engine: Engine
) -> None:
    world = World(*started)
    try:
        await each_prompt_is_taken_once(world, engine)
    finally:
        for number in range(COLLECTORS):
            await world.kill(number)


async def each_prompt_is_taken_once(world: World, engine: Engine) -> None:
    """Collect all epochs; kill a collector and start it again while the engine answers nobody."""
    began = time.monotonic()
    for number in range(COLLECTORS):
        world.start(number)
    async with (
        ReplayClient(world.endpoints[Task.REPLAY_BUFFER]) as replay,
        DataClient(world.endpoints[Task.DATA_SERVER]) as data,
    ):
        await replay.wait_healthy(IDLE_SECONDS)
        in_flight: dict[str, int] = {}

        async def all_places_are_taken() -> bool:
            in_flight.update((await replay.stats()).in_flight)
            return len(in_flight) == COLLECTORS and engine.at_once == BOUND

        await eventually(all_places_are_taken, "all collectors", progress=lambda: bytes_in(world.directory))
        # Collectors wait for room in a request that is held, not by asking often.
        most = COLLECTORS * (2 + (time.monotonic() - began) / ADMISSION_SECONDS) + BOUND
        requests = await world.admission_requests()
        assert requests <= most, f"{requests:.0f} requests for admission of {COLLECTORS} collectors"
        killed, lost = next((int(name.split("-")[1]), prompts) for name, prompts in in_flight.items() if prompts)
        await world.kill(killed)
        world.start(killed)
        # The prompts of the killed one are still at the engine, too.
        await eventually(lambda: engine.at_once == BOUND + lost, "its prompts are generated again")
        engine.open.set()
        taken = await _take(replay)
        failed = [number for number in range(COLLECTORS) if not await world.succeeded(number)]
        assert not failed, f"collectors {failed} of {COLLECTORS} failed"
        assert (await replay.stats()).model_dump()["counts"]["duplicates"] == 0
        cursors = (await data.stats()).cursors
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
