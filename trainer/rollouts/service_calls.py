"""Blocking calls of rank 0 to the services: the parts of a step that happen over the network.

Their coroutines run on the event loop of a ServiceThread, where the clients, the collector of the
asynchronous mode and the status page live.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Self

from services.clients.teacher import TeacherClient
from services.core.errors import DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.core.settings import Method
from services.core.tasks import ServiceThread
from services.engines.router import RouterAdmin, Worker
from services.http.client import PROBE_SECONDS, RequestRefusedError, describe, problem_detail
from services.protocol.groups import Group
from services.protocol.prompts import Cursor, DataStats, Prompt
from services.run_page.progress import Activity
from trainer.config import TrainerSettings
from trainer.publishing.publisher import ask_workers
from trainer.rollouts.batch import Batch, FreshQueue, sample_groups
from trainer.rollouts.clients import Clients, SuccessRates
from trainer.rollouts.evaluate import Evaluator
from trainer.rollouts.groups import judge, make_groups, makers_of

log = get_logger(__name__)

WORKER_POLL_SECONDS = 0.2
STATS_SECONDS = 10.0
"""Longest wait for figures that are recorded and nothing more."""


class ServiceCalls:
    """The calls of a run's driver to its services; each blocks until the service has answered."""

    def __init__(
        self, settings: TrainerSettings, thread: ServiceThread, clients: Clients, activity: Activity | None = None
    ) -> None:
        """Wrap the clients; ``activity`` shows what the methods wait for."""
        self.settings = settings
        self.thread = thread
        self.clients = clients
        self.makers = makers_of(settings, clients.samplers)
        self.activity = activity or Activity()
        self.evaluator = Evaluator(settings, clients.data, clients.samplers, self.activity)
        self.success_rates = SuccessRates(clients.data, settings.batch_size)
        self.fresh_queue = FreshQueue(settings, clients.data, clients.replay, partial(judge, self.makers))
        self.cursors: dict[str, Cursor] = {}
        """The prompts used so far, by source; in asynchronous mode the collectors' cursors live in the data-server."""

    @classmethod
    @contextmanager
    def connected(
        cls, settings: TrainerSettings, thread: ServiceThread, vocab_size: int, activity: Activity | None = None
    ) -> Iterator[Self]:
        """Connect to the services; within it all but the rollout workers have been healthy.

        Raises:
            ConfigurationError: AGENT cannot be imported.
            NeverReadyError: one of them did not become healthy within the deadline of the start.
        """
        clients = Clients.of(settings, vocab_size)
        main = cls(settings, thread, clients, activity)
        thread.call(clients.open())
        try:
            try:
                thread.call(clients.wait_healthy(settings.start_deadline_seconds, main.activity), interruptible=True)
            except DependencyLostError as error:
                raise NeverReadyError(str(error)) from error
            yield main
        finally:
            thread.call(clients.close())

    def describe_data(self) -> DataStats:
        """Return the data-server's description of the training data."""
        data = self.thread.call(self.clients.data.stats())
        wanted = self.settings.eval_prompts if self.settings.evaluates else 0
        if data.test_prompts < wanted:
            log.warning(f"EVAL_PROMPTS is {wanted}, but the data hold out {data.test_prompts} (DATASET_HELD_OUT)")
        return data

    @property
    def teachers(self) -> dict[str, TeacherClient]:
        """The clients of teachers behind an endpoint, by URL; each has answered its probe."""
        clients = [sampler.teacher for sampler in self.clients.samplers.values()]
        return {client.url: client for client in clients if client is not None}

    def wait_for_workers(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the router has MIN_WORKERS rollout workers; call ``meanwhile`` every two seconds of the wait.

        Raises:
            NeverReadyError: it has fewer after the deadline of the start.
        """
        waiting = self._wait_for_workers(self.settings.start_deadline_seconds)
        self.thread.call(waiting, interruptible=True, meanwhile=meanwhile)

    def fetch_prompts(self, wanted: Mapping[str, int]) -> list[Prompt]:
        """Return the next prompts of the epochs to train, as many of each source as ``wanted``; fewer at the end."""
        prompts: list[Prompt] = []
        for source, count in wanted.items():
            cursor = self.cursors.get(source, Cursor())
            fetching = self.clients.data.prompts(count, cursor=cursor, source=source)
            reply = self.thread.call(fetching, interruptible=True)
            self.cursors[source] = reply.cursor
            prompts += [prompt for prompt in reply.prompts if prompt.epoch < self.settings.epochs]
        return prompts

    def generate_and_score(self, prompts: Sequence[Prompt], batch: Batch, meanwhile: Callable[[], None]) -> list[Group]:
        """Return the groups of ``prompts``; each prompt's completions are scored as soon as they are generated.

        ``meanwhile`` is called every two seconds of the wait, in which this thread also trains on the batch's waves.

        Raises:
            ConfigurationError, DependencyLostError: every answer of too many prompts in a row failed.
        """
        started, waves = time.perf_counter(), batch.waves
        if waves is None:
            making, train = make_groups(self.makers, prompts, self.activity), None
        else:
            waves.begin(len(prompts))
            making, train = make_groups(self.makers, prompts, self.activity, waves.arrive), waves.train
        groups = self.thread.call(making, interruptible=True, meanwhile=meanwhile, between_polls=train)
        batch.seconds_training = 0.0 if waves is None else waves.end()
        generated = max(maker.last_generated for maker in self.makers.values())
        batch.seconds_scoring = max(0.0, time.perf_counter() - batch.seconds_training - max(generated, started))
        return groups

    def store(self, batch: Batch) -> None:
        """Add the groups to the replay buffer, and tell the curriculum how often prompts were answered right.

        With METHOD=sft there is no replay buffer, here and below.
        """
        if not batch.groups or self.settings.method is Method.SFT:
            return
        self.thread.call(self.clients.replay.add(batch.groups), interruptible=True)
        self.thread.call(self.success_rates.record(batch.scored), interruptible=True)

    def lease_groups(self, batch: Batch, policy_version: int, meanwhile: Callable[[], None]) -> None:
        """Fill the batch from the queue of fresh groups, which collectors fetched, generated and scored.

        ``meanwhile`` is called every two seconds of the wait.

        Raises:
            ConfigurationError, DependencyLostError: see FreshQueue.lease.
        """
        wanted = f"waiting for {self.settings.batch_size} groups from the collectors"
        self.activity.begin(wanted, lambda: f"{len(batch.groups)} there")
        self.thread.call(self.fresh_queue.lease(batch, policy_version), interruptible=True, meanwhile=meanwhile)

    def draw_replayed(self, batch: Batch, step: int, policy_version: int) -> None:
        """Draw the groups from the replay buffer that the step trains on besides its fresh ones."""
        sampling = sample_groups(self.settings, self.clients.replay, step, policy_version, batch.groups)
        batch.replayed = self.thread.call(sampling)

    def free_engines_memory(self) -> None:
        """Have engines that share the trainer's GPU sleep until the next publication (ENGINE_SLEEPS)."""
        if self.settings.engine_sleeps:
            self.thread.call(ask_workers(self.settings, "sleep", lambda engine: engine.sleep()), interruptible=True)

    def ask_engines(self, what: str, ask: Callable[[Any], Awaitable[None]]) -> None:
        """Ask every engine for ``what``, if the run needs any.

        Raises:
            DependencyLostError: one of them did not answer.
        """
        if self.settings.needs_engines:
            self.thread.call(ask_workers(self.settings, what, ask))

    def acknowledge(self, priorities: dict[str, float]) -> None:
        """Tell the replay buffer which groups were trained on, and their priorities by group id."""
        self.thread.call(self.fresh_queue.acknowledge())
        if self.settings.replay_groups:
            self.thread.call(self.clients.replay.update_priorities(priorities))

    def evaluate(self) -> dict[str, float]:
        """Evaluate the policy that the rollout workers serve on held-out prompts; see Evaluator."""
        return self.thread.call(self.evaluator.evaluate(), interruptible=True)

    def statistics(self) -> dict[str, float]:
        """Return the metrics of the ways of rolling out; nothing if the service that counts them does not answer."""
        metrics: dict[str, float] = {}
        try:
            for sampler in self.clients.asked.values():
                metrics |= self.thread.call(sampler.statistics(STATS_SECONDS))
            return metrics
        except (DependencyLostError, RequestRefusedError) as error:
            log.warning("the figures of the gateway or the judge are not known", reason=str(error))
            return {}

    def save_replay(self, label: str, deadline: float | None = None) -> None:
        """Save the replay buffer's contents and priorities under ``label``, within ``deadline`` seconds if given."""
        if self.settings.method is Method.SFT:
            return
        self.thread.call(self.clients.replay.save_snapshot(label, deadline))

    def restore_replay(self, snapshot: str | None) -> None:
        """Give the replay buffer the contents that the resumed state has trained with, and no others.

        Without a snapshot those are the contents at the run's first start, because an earlier attempt that was killed
        before its first checkpoint may have added groups that are newer than the policy.
        """
        if self.settings.method is Method.SFT:
            return
        start = f"{self.settings.run_id}-start"
        try:
            self.thread.call(self.clients.replay.restore_snapshot(snapshot or start))
        except RequestRefusedError as error:
            if error.status != 404:
                raise
            if snapshot is None:
                self.save_replay(start)
            else:
                log.warning("the replay buffer has lost the checkpoint's contents and continues with those it holds")

    def forget_replay(self, label: str, deadline: float | None = None) -> None:
        """Delete a snapshot of the replay buffer, within ``deadline`` seconds if given."""
        if self.settings.method is Method.RL:
            self.thread.call(self.clients.replay.drop_snapshot(label, deadline))

    async def _wait_for_workers(self, deadline_seconds: float) -> None:
        workers: list[Worker] = []
        wanted = self.settings.min_workers
        what = f"waiting for {wanted} rollout worker{'s' if wanted > 1 else ''}"
        reason = "no router yet"
        self.activity.begin(what, lambda: f"{len(workers)} there ({reason})", deadline_seconds)
        try:
            async with asyncio.timeout(deadline_seconds), RouterAdmin(token=self.settings.token) as router:
                while len(workers) < wanted:
                    await asyncio.sleep(WORKER_POLL_SECONDS)
                    try:
                        # Each retry is a warning in the log, but the router of a healthy start is late.
                        health = await router.send_once("GET", "/health", seconds=PROBE_SECONDS)
                        if health.status_code != HTTPStatus.OK:
                            reason = f"no router yet: {health.status_code} {problem_detail(health)}"
                            continue
                        reason = "rollout-server's log says what the others wait for"
                        workers = await router.workers()
                    except DependencyLostError as error:
                        reason = f"no router yet: {describe(error.__cause__ or error)}"
        except TimeoutError:
            raise NeverReadyError(
                f"rollout-server: not {wanted} workers (MIN_WORKERS) behind the router after "
                f"{deadline_seconds:g} s: {len(workers)} there, {reason}; see the rollout-server's log"
            ) from None
