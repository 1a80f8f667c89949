"""A check after each publication of LoRA adapters: do the workers compute with the adapter that was just published?

A worker that kept an older adapter, or has none, still answers, and its log-probabilities may lie within the numerical
noise between an engine and the trainer. So the probe compares changes: how much of the change that the trainer sees
in a text's log-probabilities does the worker see, too? That share is 1 when the adapter arrived and 0 when it did not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.clients.rollout_admin import WorkerRefusedError
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.weights.policy_store import ADAPTER_NAME
from trainer.config import TrainerSettings
from trainer.publishing.probe import TOLERANCE
from trainer.publishing.workers import drop_workers, registered_workers, worker_admin

log = get_logger(__name__)

PROBE_TEXT = (
    "Tom has 12 apples and buys 7 more, so he has 12 + 7 = 19 apples. He gives 4 apples to each of his 3 friends, "
    "4 * 3 = 12 apples in all. Now 19 - 12 = 7 apples are left."
)
PROBE_TOKENS = 64
"""Most tokens of the probe."""
LEAST_SHARE = 0.5
"""A worker that sees less of a change has not got the adapter."""
NOISE_FACTOR = 4.0
"""A change is judged once it is this many times the noise. Its share then has an error of a few percent."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the probe at one version, [N] each."""

    trainer: Tensor
    worker: Tensor


@dataclass
class _Worker:
    """The scores at the last version that a worker is known to have, and the noise between it and the trainer."""

    known: Scores
    noise: float


class AdapterProbe:
    """The probe and what each worker answered; for rank 0.

    A worker starts from the scores of the model alone, without an adapter, whose differences are the numerical noise.
    While the change since the last known version is within the noise, it is left to grow.
    """

    def __init__(self, settings: TrainerSettings, token_ids: Sequence[int], model_alone: Sequence[float]) -> None:
        """Make a probe.

        Args:
            settings: the token and MIN_WORKERS.
            token_ids: [N + 1], the probe.
            model_alone: [N], the trainer's log-probabilities of ``token_ids[1:]`` without adapters.
        """
        self._settings = settings
        self._token_ids = token_ids
        self._model_alone = _tensor(model_alone)
        self._workers: dict[str, _Worker] = {}

    async def check(self, expected: Sequence[float]) -> dict[str, float]:
        """Have every worker score the probe, and remove those without the published adapter from the routing.

        Args:
            expected: [N], the trainer's log-probabilities of ``token_ids[1:]``.

        Returns:
            ``probe_difference``, the largest mean over tokens of |log pi_worker - log pi_trainer|, and
            ``probe_delivered``, the least share of the change that a worker sees, if the change can be judged.
        """
        urls = await registered_workers(self._settings)
        found = await asyncio.gather(*(self._probe(url, _tensor(expected)) for url in urls))
        wrong = [
            url
            for url, (difference, share) in zip(urls, found, strict=True)
            if difference > TOLERANCE or (share is not None and share < LEAST_SHARE)
        ]
        if wrong:
            log.warning("workers do not compute with the published adapter", urls=wrong, difference_and_share=found)
            for url in wrong:
                self._workers.pop(url, None)
            await drop_workers(self._settings, wrong)
        shares = [share for _, share in found if share is not None]
        return {
            "probe_difference": max(difference for difference, _ in found),
            **({"probe_delivered": min(shares)} if shares else {}),
        }

    async def _probe(self, url: str, expected: Tensor) -> tuple[float, float | None]:
        """Return a worker's mean difference, and its share of the change if that can be judged."""
        async with worker_admin(self._settings, url) as client:
            try:
                if url not in self._workers:
                    alone = Scores(self._model_alone, _tensor(await client.rescore(self._token_ids)))
                    self._workers[url] = _Worker(alone, _root_mean_square(alone.trainer - alone.worker))
                now = Scores(expected, _tensor(await client.rescore(self._token_ids, ADAPTER_NAME)))
            except (WorkerRefusedError, DependencyLostError) as error:
                log.warning("worker not probed", url=url, reason=str(error))
                return float("inf"), None
        worker = self._workers[url]
        difference = float((now.trainer - now.worker).abs().mean())
        if _root_mean_square(now.trainer - worker.known.trainer) <= NOISE_FACTOR * worker.noise:
            return difference, None
        share = delivered_share(worker.known, now)
        worker.known = now
        return difference, share


def delivered_share(before: Scores, now: Scores) -> float:
    """Return the share of the trainer's change that the worker sees: least squares of its change over the trainer's."""
    trainer, worker = now.trainer - before.trainer, now.worker - before.worker
    return float(trainer @ worker / (trainer @ trainer))


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
