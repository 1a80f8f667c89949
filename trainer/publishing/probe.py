"""Checks published weights by what they compute: a worker's log-probabilities of a probe against the trainer's own."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from services.clients.rollout_admin import WorkerRefusedError
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from trainer.config import TrainerSettings
from trainer.publishing.workers import drop_workers, registered_workers, worker_control

log = get_logger(__name__)


async def probe_workers(
    settings: TrainerSettings, prompt_ids: Sequence[int], completion_ids: Sequence[int], expected: Sequence[float]
) -> float:
    """Has every worker rescore a completion; workers too far from the trainer leave the routing.

    Args:
        settings: PUBLISH_PROBE_TOLERANCE and the token.
        prompt_ids: of the probe.
        completion_ids: of the probe, N of them.
        expected: the trainer's log-probabilities of the completion, [N], at temperature 1.

    Returns:
        The largest difference of a worker, as the mean over tokens of |log pi_worker - log pi_trainer|.
    """
    urls = await registered_workers(settings)

    async def one(url: str) -> float:
        async with worker_control(settings, url) as worker:
            try:
                scores = await worker.rescore([*prompt_ids, *completion_ids])
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("worker not probed", url=url, reason=str(error))
                return float("inf")
        theirs = scores[-len(completion_ids) :]
        return statistics.fmean(abs(a - b) for a, b in zip(theirs, expected, strict=True))

    differences = await asyncio.gather(*map(one, urls))
    far = [
        url for url, difference in zip(urls, differences, strict=True) if difference > settings.publish_probe_tolerance
    ]
    if far:
        log.warning("workers compute something else than the trainer", urls=far, difference=max(differences))
        await drop_workers(settings, far)
    return max(differences, default=0.0)
