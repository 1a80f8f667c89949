"""A check of published weights: the workers' log-probabilities of a probe against the trainer's own."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from services.clients.rollout_admin import WorkerRefusedError
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from trainer.config import TrainerSettings
from trainer.publishing.workers import drop_workers, registered_workers, worker_admin

log = get_logger(__name__)

TOLERANCE = 0.1
"""Largest mean difference of a worker's logprobs in nats. bfloat16 on both sides makes 0.05, stale weights more: the
trainer computes with weights rounded to the nearest, and the worker with those that are rounded without bias."""


async def probe_workers(
    settings: TrainerSettings, prompt_ids: Sequence[int], completion_ids: Sequence[int], expected: Sequence[float]
) -> float:
    """Have every worker rescore a completion, and remove workers that differ by more than TOLERANCE from the routing.

    Args:
        settings: the token and MIN_WORKERS.
        prompt_ids: the prompt of the probe.
        completion_ids: [N], the completion of the probe.
        expected: [N], the trainer's log-probabilities of the completion at temperature 1.

    Returns:
        The largest difference of a worker, as the mean over tokens of |log pi_worker - log pi_trainer|.
    """
    urls = await registered_workers(settings)

    async def difference_of(url: str) -> float:
        async with worker_admin(settings, url) as worker:
            try:
                scores = await worker.rescore([*prompt_ids, *completion_ids])
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("worker not probed", url=url, reason=str(error))
                return float("inf")
        theirs = scores[-len(completion_ids) :]
        return statistics.fmean(abs(a - b) for a, b in zip(theirs, expected, strict=True))

    differences = await asyncio.gather(*map(difference_of, urls))
    far = [url for url, difference in zip(urls, differences, strict=True) if difference > TOLERANCE]
    if far:
        log.warning("workers compute something else than the trainer", urls=far, difference=max(differences))
        await drop_workers(settings, far)
    return max(differences, default=0.0)
