"""kill -9 of the services around episodes, at random points: their tokens equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.agents import Example
from services.clients.gateway import GatewayClient
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from tests.e2e.agents import Asking
from tests.ports import free_ports
from tests.services.conftest import RunningService, StartService
from tests.services.gateway.test_episode_tokens import OneDigit
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS, eventually
from trainer.config import TrainerSettings
from trainer.rollouts.episodes import Agents
from trainer.rollouts.groups import GroupMaker, make_groups

pytestmark = pytest.mark.slow
TURNS, GROUP_SIZE = 3, 4
PROMPTS = [Prompt(id=f"p/{n}", prompt=f"{n}+4=", ground_truth="7", position=n) for n in range(8)]
KINDS = ("gateway", "engine", "router")
asked: list[str] = []
"""The session of each call so far."""


async def insist(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
    """Ask in one conversation, and once more from its beginning."""
    asking = Asking(example, base_url=base_url, api_key=api_key, http_client=http_client)
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn}+{example.prompt}"})
        asked.append(api_key)
        messages.append({"role": "assistant", "content": await asking.say(messages)})
    asked.append(api_key)
    return float(len(await asking.say([*messages[:2], {"role": "user", "content": "1+1="}])))


class World:
    """Two engines behind the router, and the gateway in front of them."""

    def __init__(self, start_service: StartService, directory: Path, model: Path) -> None:
        self.nodes = Nodes(directory, model, 2, environment={"ROLLOUT_MAX_RESTARTS": "100"})
        self._start_service, self._directory, self._model = start_service, directory, model
        [self._port] = free_ports(1)

    def start_gateway(self) -> RunningService:
        endpoints = {**self.nodes.endpoints, "gateway-0:8005": f"127.0.0.1:{self._port}"}
        environment = {"MODEL_NAME": str(self._model), "GATEWAY_DIR": str(self._directory / "gateway")}
        environment |= {"JOBGROUP_TOKEN": TOKEN, ENDPOINTS_VARIABLE: json.dumps(endpoints)}
        self.gateway = self._start_service("services.gateway", port=self._port, healthy=False, **environment)
        return self.gateway

    def kill(self, kind: str, rank: int) -> None:
        if kind == "gateway":
            self.gateway.kill()
            self.start_gateway()
        elif kind == "router":
            self.nodes.nodes[0].router.kill()
        else:
            for engine in self.nodes.nodes[rank].children("embedded_engine"):
                engine.kill()

    async def play(self, run: str, faults: list[tuple[int, str]], draw: random.Random) -> list[Group]:
        """Play all prompts, with a fault of a kind whenever so many calls were begun, and return the groups."""
        fields: dict[str, Any] = {"rollout": "agent", "agent": f"{__name__}:insist", "model_name": str(self._model)}
        settings = TrainerSettings.load(**fields, group_size=GROUP_SIZE, max_new_tokens=24, run_id=run)
        asked.clear()
        async with GatewayClient(Endpoint("127.0.0.1", self._port), TOKEN) as client:
            maker = GroupMaker(settings, Agents(settings, OneDigit(), client, insist))  # type: ignore[arg-type]
            playing = asyncio.create_task(make_groups({"": maker}, PROMPTS))
            for calls, kind in faults:
                await eventually(partial(lambda calls: len(asked) >= calls or playing.done(), calls), every=0.005)
                await asyncio.sleep(draw.uniform(0, 0.05))
                assert not playing.done(), f"the run is over before {kind} is killed"
                await asyncio.to_thread(self.kill, kind, draw.randrange(2))
            async with asyncio.timeout(4 * IDLE_SECONDS):
                return await playing


def figures(group: Group) -> list[dict[str, Any]]:
    """Return the experiences of a group without their log-probabilities."""
    return [experience.model_dump(mode="json", exclude={"logprobs"}) for experience in group.sequences]


async def test_whatever_is_killed_the_trained_tokens_stay_the_same(
    start_service: StartService, tiny_model: Path, tmp_path: Path
) -> None:
    draw = random.Random(10)
    kinds = [*KINDS, *KINDS]
    draw.shuffle(kinds)
    # However late a fault comes, each episode still has its last call to make, or none of them would be in flight.
    places = sorted(draw.sample(range(1, len(PROMPTS) * GROUP_SIZE * TURNS), len(kinds)))
    world = World(start_service, tmp_path, tiny_model)
    try:
        gateway = world.start_gateway()
        world.nodes.start_all()
        gateway.wait_healthy()
        wanted = await world.play("faults", [], draw)
        found = await world.play("faults", list(zip(places, kinds, strict=True)), draw)
    finally:
        world.nodes.stop()
    assert [group.prompt_ids for group in found] == [group.prompt_ids for group in wanted]
    assert [figures(group) for group in found] == [figures(group) for group in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum(len(group.sequences) for group in wanted) == len(PROMPTS) * GROUP_SIZE * 2
