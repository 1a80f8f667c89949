"""The delivery of policy versions: rank 0 has every registered worker serve a version that the ranks have written.

Workers that do not serve it leave the routing. Their launchers bring them up to date and register them again. The run
waits for that only when fewer than MIN_WORKERS workers are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from prometheus_client import Counter
from torch import Tensor

from services.core.endpoints import WEIGHTS_BROADCAST_PORT, is_own_address
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.machine import installed_nccl
from services.core.tasks import ServiceThread, in_background
from services.engines.engine import Delivery, Engine, Requests, WorkerRefusedError, from_directory
from services.engines.proof import UnprovenError, Verdict
from services.engines.router import NCCL_LABEL, RouterAdmin, Worker
from services.engines.settings import EngineKind
from services.weights.policy_store import ADAPTER_NAME
from trainer.capacity.seconds import WEIGHT_BYTES, publish_seconds
from trainer.capacity.shape import ModelShape
from trainer.config import TrainerSettings, Transport
from trainer.model.families import check_sglang_lora
from trainer.publishing.broadcast import MOST_UNFORMED, Broadcaster, Outcome
from trainer.publishing.proof import Prover
from trainer.publishing.writer import PUBLISH_SECONDS, REMEDY, VersionWriter

log = get_logger(__name__)
T = TypeVar("T")

WORKERS_DROPPED = Counter("trainer_workers_dropped", "Rollout workers removed from the routing for a failed update.")

WRITES = 4
"""Most times that a version is written before its disappearance ends the run."""
ANSWER_SECONDS = 60.0
"""Longest wait for each answer of a worker that gives its memory away, or records a profile."""
POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0
"""Longest wait for a worker to say which version it serves."""


class VersionGoneError(DependencyLostError):
    """The loss of the version that workers wait for from the shared volume."""


class Publisher:
    """Has the rollout workers serve policy versions; on rank 0."""

    def __init__(
        self,
        settings: TrainerSettings,
        services: ServiceThread,
        writer: VersionWriter,
        write: Callable[[int], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Make a publisher.

        Args:
            settings: MIN_WORKERS, the transport, the token.
            services: runs the requests to router and workers.
            writer: the writer of this rank.
            write: has the writers of all ranks write a version; without it there is one rank.
            release: has the writers of all ranks give the GPUs' memory of a version back; likewise.
        """
        self.settings = settings
        self.services = services
        self.writer = writer
        self._write = write or writer.write
        self._release = release or writer.release
        is_broadcast = settings.publish_transport is Transport.BROADCAST and not settings.lora_rank
        self.broadcaster = Broadcaster(settings, writer.ranks.device, PUBLISH_SECONDS) if is_broadcast else None
        self.prover = Prover(settings, writer)
        self.refusal = ""
        """The reason why the run has given broadcasts up; empty while it has not."""

    def publish(self, version: int) -> dict[str, float]:
        """Have the workers serve ``version``; write it first, unless it was the last version written.

        Returns:
            Seconds and counts by metric name.

        Raises:
            DependencyLostError: fewer than MIN_WORKERS workers serve the version.
            DiskFullError: the version cannot be written.
            InterruptedCallError: the run was asked to stop.
        """
        writes = 0
        if self.broadcaster is not None and self.broadcaster.backend == "nccl":
            self.services.call(self._compare_nccl(installed_nccl()), interruptible=True)
            if self.broadcaster is None:
                self.writer.written = None  # A thread may still write what would have been sent.
        while True:
            if self.writer.written != version:
                self._write(version)
            try:
                metrics = self.services.call(self._deliver(version), interruptible=True)
                if self.writer.on_gpus is not None:
                    self._release()
                return self.writer.metrics | metrics
            except VersionGoneError as error:
                writes += 1
                if writes == WRITES:
                    raise
                log.warning("policy version is written again", policy_version=version, reason=str(error))
                self.writer.written = None

    def keep_on_volume(self) -> None:
        """Write the newest version again if the volume has lost it, because a worker that comes back waits for it.

        Raises:
            ConfigurationError: a worker that came back has failed the proof of the version twice.
        """
        version = self.writer.written
        if version is not None:
            self.prover.refuse([], version)
        if version is not None and not self.writer.is_on_volume(version):
            log.warning("policy version is written again", policy_version=version, reason="it has gone from the volume")
            self._write(version)
            # It is sent to nobody: a worker that comes back loads it from the volume.
            self.writer.state = {}
            if self.writer.on_gpus is not None:
                self._release()

    def rescored(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return a worker's log-probabilities of the tokens but the first of each text, with the newest version.

        Raises:
            WorkerRefusedError, DependencyLostError: it gave none.
        """

        async def ask() -> list[list[float]]:
            worker, adapter = (await self.registered_workers())[0], ADAPTER_NAME if self.settings.lora_rank else None
            return await self._with(worker, lambda e: asyncio.gather(*(e.rescore(text, adapter) for text in texts)))

        return self.services.call(ask())

    async def registered_workers(self, awaited: int | None = None, *, serve_it: bool = False) -> list[Worker]:
        """Return the workers that the router knows, once they are at least MIN_WORKERS.

        Args:
            awaited: the version for which workers wait that are not registered, if any.
            serve_it: return only those that serve this version.

        Raises:
            VersionGoneError: they are fewer, and the volume has lost the version that others could load.
            DependencyLostError: they are fewer after PUBLISH_SECONDS.
            ConfigurationError: a worker has failed the proof of the version twice.
        """
        workers: list[Worker] = []
        wanted = self.settings.min_workers
        try:
            async with asyncio.timeout(PUBLISH_SECONDS), router_of(self.settings) as router:
                while True:
                    workers = await router.workers()
                    if serve_it:
                        versions = await asyncio.gather(*map(self._version_or_none, workers))
                        workers = [
                            worker for worker, served in zip(workers, versions, strict=True) if served == awaited
                        ]
                    if len(workers) >= wanted:
                        return workers
                    if awaited is not None:
                        await in_background(partial(self.prover.refuse, [], awaited))
                    if awaited is not None and not await in_background(partial(self.writer.is_on_volume, awaited)):
                        raise VersionGoneError(f"the newest policy version has gone from {self.settings.policy_dir}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            state = f"serve policy version {awaited}" if serve_it else "are registered with the router"
            raise DependencyLostError(
                f"{len(workers)} rollout workers {state} after {PUBLISH_SECONDS:g} s, MIN_WORKERS is {wanted}; see "
                "the rollout-server's log"
            ) from None

    async def _compare_nccl(self, own: str | None) -> None:
        """Give broadcasts up if a worker has another version of NCCL than this process, because no group joins both."""
        async with router_of(self.settings) as router:
            others = {worker.url: worker.metadata.get(NCCL_LABEL) for worker in await router.workers()}
        if own and (different := {url: nccl for url, nccl in others.items() if nccl not in (None, own)}):
            versions = ", ".join(sorted({*different.values()}))
            self._give_broadcasts_up(
                f"NCCL is {own} on the trainer and {versions} on {len(different)} workers",
                f"install nvidia-nccl-cu13=={own} on the nodes of rollout-server",
                len({urlsplit(url).hostname for url in others}),
            )

    async def _deliver(self, version: int) -> dict[str, float]:
        """Have all workers serve the version at once and prove it, drop those that do not, and return metrics.

        With fewer than MIN_WORKERS left, wait until launchers have brought others up to date.

        Raises:
            VersionGoneError: fewer than MIN_WORKERS serve the version, and the volume has lost it.
            DependencyLostError: fewer than MIN_WORKERS serve the version, even after PUBLISH_SECONDS more.
            ConfigurationError: no worker has proven the version, or one has failed twice, or does not compute with
                such adapters.
        """
        workers = await self.registered_workers(version)
        if self.settings.lora_rank and any(worker.kind == EngineKind.SGLANG for worker in workers):
            check_sglang_lora(self.writer.policy.config.model_type, self.settings.lora_rank)
        check = None if self.settings.lora_rank else partial(self.prover.check_weights, version)
        # A worker that does not answer is not updated either, and one that a dead trainer has paused answers later.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                looks = (self._with(worker, partial(self.prover.look, version)) for worker in workers)
                await asyncio.gather(*looks, return_exceptions=True)
        requests: Requests = "continue" if self.settings.publishes_in_place else "finish"
        state, self.writer.state = self.writer.state, {}
        outcomes: Sequence[Outcome]
        if self.broadcaster is not None and state:
            outcomes = await self.broadcaster.send(version, state, workers, requests, check)
            if self.broadcaster.unformed >= MOST_UNFORMED:
                self._give_broadcasts_up(
                    self.broadcaster.refusal,
                    f"compare the networks of NCCL on trainer and engines (docs/gpus.md), open port "
                    f"{WEIGHTS_BROADCAST_PORT} between them, or set PUBLISH_TRANSPORT=disk",
                    len({urlsplit(worker.url).hostname for worker in workers}),
                )
        else:
            delivery = replace(self._delivery(version, state, workers), check=check)
            serving = (self._with(w, lambda e: e.serve(delivery, requests, PUBLISH_SECONDS)) for w in workers)
            outcomes = await asyncio.gather(*serving, return_exceptions=True)
        outcomes, proofs = await self._prove(version, workers, outcomes)
        pauses = await self._settle(version, workers, outcomes)
        served = len(pauses)
        if served < self.settings.min_workers:
            served = len(await self.registered_workers(version, serve_it=True))
        return {
            "workers": float(served),
            "pause_seconds": max(pauses, default=0.0),
            **proofs,
            **({"publish_by_disk": 1.0} if self.refusal else {}),
        }

    def _delivery(self, version: int, state: dict[str, Tensor], workers: Sequence[Worker]) -> Delivery:
        """Return the version that was written last for these workers; ``state`` has its tensors if they are sent."""
        writer, is_adapter = self.writer, self.settings.lora_rank > 0
        if self.settings.publish_transport is Transport.LOCAL:
            check_hosts(workers)
        if writer.on_gpus is not None and state:
            return writer.on_gpus.delivery(version, workers)
        return from_directory(version, writer.path, is_adapter=is_adapter)

    async def _prove(
        self, version: int, workers: Sequence[Worker], outcomes: Sequence[Outcome]
    ) -> tuple[Sequence[Outcome], dict[str, float]]:
        """Have the workers answer a fixed text; return the outcomes with the errors of proofs, and metrics.

        Raises:
            ConfigurationError: see Prover.refuse.
        """
        started = time.perf_counter()
        places = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, float)]
        asking = (self._with(workers[place], partial(self.prover.check_answers, version)) for place in places)
        answers = dict(zip(places, await asyncio.gather(*asking, return_exceptions=True), strict=True))
        unlike = self.prover.unlike_others(version)
        proven: list[Outcome] = []
        for place, (worker, outcome) in enumerate(zip(workers, outcomes, strict=True)):
            answer = answers.get(place)
            error = unlike.get(worker.url, answer if isinstance(answer, BaseException) else None)
            proven.append(error or outcome)
        wrong = [error for error in proven if isinstance(error, UnprovenError)]
        are_all = bool(wrong) and len(wrong) == sum(isinstance(each, float | UnprovenError) for each in proven)
        self.prover.refuse(wrong, version, are_all=are_all)
        for worker, outcome in zip(workers, proven, strict=True):
            if isinstance(outcome, UnprovenError):
                with contextlib.suppress(WorkerRefusedError, DependencyLostError):
                    await self._with(worker, lambda engine: engine.pause("abort"))  # requests that it is computing
        verdicts = [answer for answer in answers.values() if isinstance(answer, Verdict)]
        return proven, self.prover.metrics(verdicts, len(wrong), time.perf_counter() - started)

    async def _with(self, worker: Worker, ask: Callable[[Engine], Awaitable[T]], seconds: float | None = None) -> T:
        """Ask a worker's engine, which has ``seconds``, by default PUBLISH_SECONDS, for each answer."""
        async with worker.engine(self.settings.token, timeout=seconds or PUBLISH_SECONDS) as engine:
            return await ask(engine)

    async def _settle(self, version: int, workers: Sequence[Worker], outcomes: Sequence[Outcome]) -> list[float]:
        """Remove the workers from the routing that do not serve the version; return the pauses of the others.

        Their launchers bring them up to date and register them again.
        """
        failed = []
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, WorkerRefusedError | DependencyLostError | TimeoutError):
                reason = str(outcome) or "timed out"
                log.warning("worker not updated", url=worker.url, policy_version=version, reason=reason)
                failed.append(worker)
            elif isinstance(outcome, BaseException):
                raise outcome
        if failed:
            WORKERS_DROPPED.inc(len(failed))
            async with router_of(self.settings) as router:
                for worker in failed:
                    await router.remove(worker.url)
        return [outcome for outcome in outcomes if isinstance(outcome, float)]

    def _give_broadcasts_up(self, reason: str, remedy: str, nodes: int) -> None:
        """Have the workers load all further versions from the shared volume, and log the forecast of what it costs."""
        self.refusal, self.broadcaster, self.writer.is_sent = reason, None, False
        shape = ModelShape.of(self.writer.policy.config, trust_remote_code=self.settings.trust_remote_code)
        log.error(
            f"versions cannot be broadcast, so the rest of the run publishes over the shared volume; {remedy}",
            reason=reason,
            version_bytes=WEIGHT_BYTES * shape.parameters,
            seconds_by_volume=round(publish_seconds(shape, nodes, by_volume=True), 1),
            seconds_by_broadcast=round(publish_seconds(shape, nodes, by_volume=False), 1),
        )

    async def _version_or_none(self, worker: Worker) -> int | None:
        try:
            return await self._with(worker, lambda engine: engine.version(), PROBE_SECONDS)
        except (WorkerRefusedError, DependencyLostError):
            return None


def check_hosts(workers: Sequence[Worker]) -> None:
    """Check that every worker is on rank 0's host, whose memory it reads.

    Raises:
        ConfigurationError: one runs on another host.
    """
    for worker in workers:
        if not is_own_address(urlsplit(worker.url).hostname or ""):
            raise ConfigurationError(
                f"PUBLISH_TRANSPORT=local, but worker {worker.url} runs on another host than the trainer; {REMEDY}"
            )


def router_of(settings: TrainerSettings) -> RouterAdmin:
    """Return a client of the router that waits for it as long as for any service."""
    return RouterAdmin(token=settings.token, deadline=settings.service_deadline_seconds)


async def ask_workers(settings: TrainerSettings, what: str, ask: Callable[[Engine], Awaitable[None]]) -> None:
    """Ask every registered worker for ``what`` at once; what one refuses is a line in the log.

    Raises:
        DependencyLostError: the router does not answer.
    """

    async def ask_one(worker: Worker) -> None:
        try:
            async with worker.engine(settings.token, timeout=ANSWER_SECONDS) as engine:
                await ask(engine)
        except (WorkerRefusedError, DependencyLostError) as error:
            log.warning(f"a worker does not {what}", url=worker.url, reason=str(error))

    async with router_of(settings) as router:
        await asyncio.gather(*map(ask_one, await router.workers()))
