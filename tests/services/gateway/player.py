"""A collector's part that plays episodes: ``python -m tests.services.gateway.player WORK.json``.

It plays the prompts whose group is not yet among the files, some at a time, and writes each group when it is done, as a
collector pushes it into the queue. So another player takes up what a killed one has left.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from services.agents import Example
from services.clients.gateway import GatewayClient
from services.core.endpoints import Endpoint
from services.core.files import atomic_write
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult
from tests.e2e.agents import Asking
from trainer.config import TrainerSettings
from trainer.rollouts.episodes import Agents
from trainer.rollouts.groups import GroupMaker

TURNS = 3
GROUP_SIZE = 4
AT_ONCE = 3


@dataclass(frozen=True)
class Work:
    """The prompts to play, the gateway, and the directory of the results."""

    port: int
    token: str
    model: str
    directory: str
    prompts: int

    def write(self) -> Path:
        path = Path(self.directory) / "work.json"
        path.write_bytes(orjson.dumps(asdict(self)))
        return path

    def path(self, number: int) -> Path:
        """The file of a prompt's group."""
        return Path(self.directory) / f"group-{number}.json"

    def groups(self) -> list[Group]:
        """The groups of all prompts."""
        return [Group.model_validate_json(self.path(number).read_bytes()) for number in range(self.prompts)]


async def insist(example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
    """Ask in one conversation, and once more from its beginning."""
    asking = Asking(example, base_url=base_url, api_key=api_key, http_client=http_client)
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn}+{example.prompt}"})
        messages.append({"role": "assistant", "content": await asking.say(messages)})
    other = await asking.say([*messages[:2], {"role": "user", "content": "1+1="}])
    return float(len(other))


class NoScores:
    """A reward-server that nobody asks for a score."""

    async def is_relative(self, source: str) -> bool:
        return False

    async def score(self, items: list[RewardItem], *, tries: int = 1) -> list[RewardResult]:
        raise NotImplementedError


async def play(work: Work) -> None:
    """Play what is missing."""
    settings: dict[str, Any] = {"rollout": "agent", "agent": f"{__spec__.name}:insist", "model_name": work.model}
    made = TrainerSettings.load(**settings, group_size=GROUP_SIZE, max_new_tokens=24, run_id="faults")
    places = asyncio.Semaphore(AT_ONCE)
    async with GatewayClient(Endpoint("127.0.0.1", work.port), work.token) as client:
        maker = GroupMaker(made, Agents(made, NoScores(), client, insist))  # type: ignore[arg-type]

        async def one(number: int) -> None:
            prompt = Prompt(id=f"p/{number}", prompt=f"{number}+4=", ground_truth="7", position=number)
            async with places:
                group = await maker.make_group(prompt)
            assert group is not None, maker.last_failure
            atomic_write(work.path(number), group.model_dump_json())

        missing = [number for number in range(work.prompts) if not work.path(number).exists()]
        await asyncio.gather(*map(one, missing))


if __name__ == "__main__":
    asyncio.run(play(Work(**orjson.loads(Path(sys.argv[1]).read_bytes()))))
