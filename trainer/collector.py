"""Collectors of the asynchronous mode: prompts in, scored groups into the replay buffer's fresh queue.

One runs beside the trainer by default; ``python -m trainer.collector`` runs one by itself, any number of them, on any
node of the job group. They share the data-server's cursor, so that each prompt is taken once per epoch.
"""

from __future__ import annotations

import asyncio
import sys

from prometheus_client import Counter
from transformers import AutoConfig

from services import logs
from services.clients import DataClient, ReplayClient, RewardClient
from services.endpoints import Task
from services.errors import DependencyLostError
from services.logs import get_logger
from services.protocol import Prompt
from services.rollout_client import RolloutClient
from services.scaffold import exit_code_of
from trainer.config import TrainerSettings
from trainer.experience import GroupMaker, initial_priority
from trainer.sources import COLLECTORS

log = get_logger(__name__)

COLLECTED = Counter("collector_groups", "Groups pushed into the fresh queue.")

FULL_QUEUE_POLL_SECONDS = 0.2


class Collector:
    """Keeps GENERATION_CONCURRENCY prompts in flight until the training prompts are used up.

    It never waits for the learner, except that it stops taking prompts while the queue already holds more groups than
    the learner can train on before they are too stale.
    """

    def __init__(self, settings: TrainerSettings, data: DataClient, maker: GroupMaker, replay: ReplayClient) -> None:
        self.settings = settings
        self.data = data
        self.maker = maker
        self.replay = replay
        self._places = asyncio.Semaphore(settings.generation_concurrency)
        self._in_flight = 0

    async def run(self) -> None:
        """Collects until the last epoch's prompts are used up.

        Raises:
            DependencyLostError: a service was lost.
        """
        try:
            async with asyncio.TaskGroup() as flights:
                await self._take_prompts(flights)
        except* DependencyLostError as lost:
            raise lost.exceptions[0] from None

    async def _take_prompts(self, flights: asyncio.TaskGroup) -> None:
        while True:
            await self._wait_for_room()
            prompts = (await self.data.prompts(self.settings.batch_size, consumer=COLLECTORS)).prompts
            for prompt in prompts:
                if prompt.epoch >= self.settings.num_epochs:
                    return
                await self._places.acquire()
                self._in_flight += 1
                flights.create_task(self._collect(prompt))

    async def _collect(self, prompt: Prompt) -> None:
        try:
            group = await self.maker.make(prompt)
            if group is not None:
                await self.replay.enqueue([group], [initial_priority(group)])
                COLLECTED.inc()
        finally:
            self._in_flight -= 1
            self._places.release()

    async def _wait_for_room(self) -> None:
        most = self.settings.batch_size * (self.settings.max_staleness + 1)
        while True:
            ahead = (await self.replay.stats()).waiting + self._in_flight
            if ahead + self.settings.batch_size <= most:
                return
            await asyncio.sleep(FULL_QUEUE_POLL_SECONDS)


async def collect(settings: TrainerSettings) -> None:
    """Connects to the services and collects until the prompts are used up."""
    token, deadline = settings.token, settings.service_deadline_seconds
    config = AutoConfig.from_pretrained(settings.model_name, trust_remote_code=settings.trust_remote_code)
    async with (
        DataClient(token=token, deadline=deadline) as data,
        RewardClient(token=token, deadline=deadline) as rewards,
        ReplayClient(token=token, deadline=deadline) as replay,
        RolloutClient(
            token=token,
            vocab_size=config.vocab_size,
            max_concurrency=settings.generation_concurrency,
            deadline_seconds=settings.generation_deadline_seconds,
        ) as rollouts,
    ):
        await asyncio.gather(*(service.wait_healthy(deadline) for service in (data, rewards, replay)))
        await Collector(settings, data, GroupMaker(settings, rollouts, rewards), replay).run()


def main() -> None:
    """Runs one collector."""
    settings = TrainerSettings.load()
    logs.configure(Task.COLLECTOR.value, settings.log_level)
    asyncio.run(collect(settings))
    log.info("all prompts collected")


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
