"""Collectors of the asynchronous mode: prompts in, scored groups into the replay buffer's fresh queue.

By default one runs in the trainer's process. ``python -m trainer.collector`` runs further ones, any number of them, on
any node of the job group. They share the data-server's cursor, so that each prompt is taken once per epoch. The prompts
that a collector has taken are on disk, and its next process begins with those of which it pushed no group.
"""

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path

from prometheus_client import Counter
from pydantic import BaseModel

from services.clients.data import DataClient
from services.core import endpoints, logs
from services.core.endpoints import Task
from services.core.errors import ConfigurationError, DependencyLostError, exit_code_of
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.core.models import vocabulary_size
from services.core.processes import kill_stale_processes
from services.http import provenance
from services.protocol.prompts import COLLECTOR_PREFIX, COLLECTORS, Cursor, Prompt
from services.protocol.replay import AdmissionRequest
from trainer.checkpoints.state import check_data, has_succeeded
from trainer.config import TrainerSettings
from trainer.rollouts.clients import Clients, SuccessRates
from trainer.rollouts.groups import GroupMaker, Makers, makers_of

log = get_logger(__name__)

COLLECTED = Counter("collector_groups", "Groups pushed into the fresh queue.")

ADMISSION_SECONDS = 5.0
"""Longest wait for room of one request. The replay-buffer forgets a collector that does not ask for much longer."""


def collector_name(number: int) -> str:
    """Return the consumer of one collector: its cursor is at epoch NUM_EPOCHS once all its groups are in the queue."""
    return f"{COLLECTOR_PREFIX}{number}"


class Collector:
    """A producer of fresh groups, which keeps many prompts in flight until they are used up.

    It waits for the learner in one case only: while a further prompt's group would be too stale when the learner
    reaches it. The replay buffer decides that, because it knows the learner's progress and the prompts in flight.
    """

    def __init__(self, settings: TrainerSettings, clients: Clients, maker: GroupMaker, number: int = 0) -> None:
        """Make the collector of that number, which no other collector has at the same time.

        It collects groups of the maker's source. Those of other sources have places of their own, in flight and in the
        queue, so that neither slow nor fast ones keep them waiting.
        """
        self.settings = settings
        self.data = clients.data
        self.replay = clients.replay
        self.maker = maker
        self.success_rates = SuccessRates(clients.data, maker.batch_size)
        of_source = f"-{maker.source}" if maker.source else ""
        self.name = collector_name(number) + of_source
        file = settings.run_dir / "collectors" / f"{number}{of_source}.json"
        self._taken = InFlightPrompts(clients.data, file, maker.source)
        self._flights: set[asyncio.Task[None]] = set()
        share = settings.schedule.shares[maker.source]
        self._concurrency = math.ceil(settings.generation_concurrency * share)
        self._bound = groups_within(settings.batch_size * share, settings.max_staleness)

    async def run(self) -> None:
        """Collect until the last epoch's prompts are used up; tell the data-server before and after.

        Raises:
            DependencyLostError: a service was lost, or a whole batch of prompts in a row got no completion.
            ConfigurationError: the rollout workers refuse every prompt.
        """
        # The prompts of SOURCES are never used up, so nobody asks how far they are.
        if self.settings.sources is None:
            await self.data.set_cursor(self.name, Cursor())
        async with _tasks() as flights:
            await self._take_prompts(flights)
        await self.data.set_cursor(self.name, Cursor(epoch=self.settings.num_epochs))

    async def _take_prompts(self, flights: asyncio.TaskGroup) -> None:
        prompts = await self._taken.unfinished()
        while True:
            for prompt in prompts:
                if prompt.epoch >= self.settings.epochs:
                    # The places of this prompt and of those after it are free again.
                    await self._ask_for_places(0)
                    return
                flight = flights.create_task(self._collect(prompt))
                self._flights.add(flight)
                flight.add_done_callback(self._flights.discard)
            prompts = await self._taken.take(await self._wait_for_room())

    async def _collect(self, prompt: Prompt) -> None:
        group = await self.maker.make_group(prompt)
        if group is None:
            self.maker.check()
        else:
            await self.replay.enqueue([group], collector=self.name)
            COLLECTED.inc()
            await self.success_rates.record([group])
        self._taken.finish(prompt)

    async def _wait_for_room(self) -> int:
        """Wait until at least one prompt may be taken; return how many, at most a batch."""
        while True:
            most = min(self.maker.batch_size, self._concurrency - len(self._flights))
            if places := await self._ask_for_places(max(0, most)):
                return places
            if most <= 0:
                await asyncio.wait(self._flights, timeout=ADMISSION_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _ask_for_places(self, most: int) -> int:
        """Tell the replay-buffer how many prompts are in flight, and return how many more it admits."""
        return await self.replay.admit(
            AdmissionRequest(
                collector=self.name,
                in_flight=len(self._flights),
                most=most,
                batch_size=self.maker.batch_size,
                max_staleness=self.settings.max_staleness,
                source=self.maker.source,
                bound=self._bound,
                wait_seconds=ADMISSION_SECONDS if most else 0,
            )
        )


def groups_within(per_step: Fraction, steps: int) -> int:
    """Return a number of a source's groups that any ``steps`` steps train at least, given its groups ``per_step``."""
    # The schedule is less than one group away from the quota, at the beginning and at the end.
    return max(0, math.floor(per_step * steps) - (per_step.denominator > 1))


async def collect_sources(settings: TrainerSettings, clients: Clients, makers: Makers, number: int = 0) -> None:
    """Run the collector of each source that is trained on, all of one number.

    Raises:
        DependencyLostError, ConfigurationError: see ``Collector.run``.
    """
    async with _tasks() as collectors:
        for source in settings.schedule.shares:
            collectors.create_task(Collector(settings, clients, makers[source], number).run())


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Run tasks until all end; raise the error of the first that failed, one that says what to do before others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as ended:
        known = (error for error in ended.exceptions if isinstance(error, ConfigurationError | DependencyLostError))
        raise next(known, ended.exceptions[0]) from None


async def collect(settings: TrainerSettings) -> None:
    """Connect to the services and collect until the prompts are used up."""
    clients = Clients.of(settings, vocabulary_size(settings.model_name, "MODEL_NAME"))
    await clients.open()
    try:
        await clients.wait_healthy(settings.service_deadline_seconds)
        # The trainer refuses other data, too; but groups of these would be in the queue by then.
        check_data(settings, await clients.data.stats())
        await collect_sources(settings, clients, makers_of(settings, clients.samplers), endpoints.node_rank())
    finally:
        await clients.close()


def main() -> None:
    """Run one collector."""
    settings = TrainerSettings.load()
    logs.configure(Task.COLLECTOR.value, settings.log_level)
    kill_stale_processes()
    endpoints.ask_directly()
    if has_succeeded(settings):
        return
    provenance.write_record(settings, Task.COLLECTOR)
    asyncio.run(collect(settings))
    log.info("all prompts collected")


class _Record(BaseModel):
    """The file's content."""

    request_id: str | None = None
    """The request for prompts that was sent and whose reply is not among ``open`` yet."""
    size: int = 0
    """The number of prompts that the request asked for."""
    open: list[tuple[int, int]] = []
    """Epoch and position of each prompt whose group is not in the queue."""


class InFlightPrompts:
    """The prompts that a collector has taken and whose groups are not in the queue yet.

    The data-server gives each prompt once an epoch. So a collector that was killed in between finds its prompts here
    when it is restarted, and generates their groups again. A group that was in the queue already has the same id, and
    the replay-buffer leaves the second one out.
    """

    def __init__(self, data: DataClient, file: Path, source: str) -> None:
        """Read the prompts of an earlier process from ``file``, or create it."""
        self._data = data
        self._source = source
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._record = _Record.model_validate_json(file.read_bytes()) if file.exists() else _Record()

    async def unfinished(self) -> list[Prompt]:
        """Return the prompts that an earlier process took and did not finish."""
        prompts = []
        for epoch, position in self._record.open:
            cursor = Cursor(epoch=epoch, position=position)
            prompts += (await self._data.prompts(1, cursor=cursor, source=self._source)).prompts
        if self._record.request_id is not None:
            prompts += await self._ask()
        if prompts:
            log.warning("regenerating groups that a killed collector left unfinished", prompts=len(prompts))
        return prompts

    async def take(self, size: int) -> list[Prompt]:
        """Take the next prompts, ``size`` at most."""
        self._record.request_id, self._record.size = uuid.uuid4().hex, size
        self._save()
        return await self._ask()

    def finish(self, prompt: Prompt) -> None:
        """Note that a prompt's group is in the queue, or will never be."""
        self._record.open.remove((prompt.epoch, prompt.position))
        self._save()

    async def _ask(self) -> list[Prompt]:
        """Send the request, perhaps once more, which gives the same prompts."""
        record = self._record
        batch = await self._data.prompts(
            record.size, consumer=COLLECTORS, request_id=record.request_id, source=self._source
        )
        record.open += [(prompt.epoch, prompt.position) for prompt in batch.prompts]
        record.request_id = None
        self._save()
        return batch.prompts

    def _save(self) -> None:
        try:
            atomic_write(self._file, self._record.model_dump_json())
        except OSError as error:  # such as a full disk
            raise DependencyLostError(f"{self._file} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
