"""A check after each publication: do the workers compute what was just published?

With PUBLISH_PROBE, a worker's log-probabilities of a completion are compared with the trainer's own.

With LORA_RANK that is not enough. A worker that kept an older adapter, or has none, still answers, and its
log-probabilities may lie within the numerical noise between an engine and the trainer. So changes are compared: how
much of the change that the trainer sees in a text's log-probabilities does the worker see, too? That share is 1 when
the adapter arrived and 0 when it did not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.engines.engine import WorkerRefusedError
from services.engines.router import Worker
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from services.weights.policy_store import ADAPTER_NAME
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.model.micro_batching import unknown_ids
from trainer.model.policy import Policy
from trainer.publishing.publisher import Publisher

log = get_logger(__name__)

TOLERANCE = 0.1
"""Largest mean difference of a worker's logprobs in nats. With the same weights, other kernels in bfloat16 make
0.05, stale weights more."""
PROBE_TEXT = (
    "Tom has 12 apples and buys 7 more, so he has 12 + 7 = 19 apples. He gives 4 apples to each of his 3 friends, "
    "4 * 3 = 12 apples in all. Now 19 - 12 = 7 apples are left."
)
PROBE_TOKENS = 64
"""Most tokens of the adapters' probe."""
LEAST_SHARE = 0.5
"""A worker that sees less of a change has not got the adapter."""
NOISE_FACTOR = 4.0
"""A change is judged once it is this many times the noise. Its share then has an error of a few percent."""


class Probe:
    """The checks that the settings ask for; on rank 0."""

    def __init__(self, publisher: Publisher, policy: Policy, logprobs: Callable[..., list[PerToken]]) -> None:
        """Make a probe.

        Args:
            publisher: knows the workers, and drops those that fail.
            policy: the policy in training.
            logprobs: computes log-probabilities on all ranks; see Learner.logprobs.
        """
        self._publisher = publisher
        self._policy = policy
        self._logprobs = logprobs
        self._adapter_probe: AdapterProbe | None = None

    def check(self, groups: Iterable[TrainingGroup]) -> dict[str, float]:
        """Have the workers compute, and drop those that differ; return metrics.

        Args:
            groups: one completion of these is compared, with whole weights; there are none before the first step.
        """
        settings = self._publisher.settings
        if settings.lora_rank:
            return self._check_adapters()
        return self._check_weights(groups) if settings.publish_probe else {}

    def _check_weights(self, groups: Iterable[TrainingGroup]) -> dict[str, float]:
        group = next(self._completions(groups), None)
        if group is None:
            return {}
        (expected,) = self._logprobs([group], temperature=1.0)[0]
        token_ids = [*group.prompt_ids, *group.sequences[0].completion_ids.tolist()]
        return self._publisher.services.call(probe_weights(self._publisher, token_ids, expected.tolist()))

    def _completions(self, groups: Iterable[TrainingGroup]) -> Iterator[TrainingGroup]:
        """Yield each completion of which the trainer computes log-probabilities, as a group without a loss mask."""
        for group in groups:
            for sequence in group.sequences:
                probe = replace(group, sequences=[sequence.model_copy(update={"loss_mask": None})])
                if sequence.tokens and not len(unknown_ids(probe, self._policy.config.vocab_size)):
                    yield probe

    def _check_adapters(self) -> dict[str, float]:
        description = self._policy.description
        assert description is not None, "rank 0 has it"
        token_ids = description.tokenizer.encode(PROBE_TEXT)[:PROBE_TOKENS]
        zeros = [0] * (len(token_ids) - 1)
        tokens = TokenSequence(
            completion_ids=token_ids[1:], logprobs=zeros, policy_versions=zeros, finish_reason=FinishReason.LENGTH
        )
        group = TrainingGroup(token_ids[:1], [tokens])
        if self._adapter_probe is None:
            (model_alone,) = self._logprobs([group], temperature=1.0, use_adapters=False)[0]
            self._adapter_probe = AdapterProbe(self._publisher, token_ids, model_alone.tolist())
        (expected,) = self._logprobs([group], temperature=1.0)[0]
        return self._publisher.services.call(self._adapter_probe.check(expected.tolist()))


async def probe_weights(publisher: Publisher, token_ids: Sequence[int], expected: Sequence[float]) -> dict[str, float]:
    """Have every worker rescore a text, and drop workers that differ by more than TOLERANCE.

    Args:
        publisher: knows the workers.
        token_ids: the prompt and the completion of the probe.
        expected: [N], the trainer's log-probabilities of the completion, the last N tokens, at temperature 1.

    Returns:
        ``probe_difference``, the largest mean over tokens of |log pi_worker - log pi_trainer|.
    """
    workers = await publisher.registered_workers()
    scores = await asyncio.gather(*(_rescored(publisher, worker, token_ids, None) for worker in workers))
    differences = [
        float("inf") if own is None else _mean_difference(own[-len(expected) :], _tensor(expected)) for own in scores
    ]
    largest = max(differences, default=0.0)
    message = "workers compute something else than the trainer"
    await _drop(publisher, workers, [each > TOLERANCE for each in differences], message, difference=largest)
    return {"probe_difference": largest}


async def _rescored(
    publisher: Publisher, worker: Worker, token_ids: Sequence[int], adapter: str | None
) -> Tensor | None:
    """Return a worker's log-probabilities of ``token_ids[1:]``; None if it does not give any."""
    try:
        async with publisher.engine(worker) as engine:
            return _tensor(await engine.rescore(token_ids, adapter))
    except (WorkerRefusedError, DependencyLostError) as error:
        log.warning("worker not probed", url=worker.url, reason=str(error))
        return None


async def _drop(
    publisher: Publisher, workers: Sequence[Worker], are_wrong: Sequence[bool], message: str, **found: object
) -> list[Worker]:
    """Take the workers that are wrong out of the routing, with a line in the log, and return them."""
    wrong = [worker for worker, is_wrong in zip(workers, are_wrong, strict=True) if is_wrong]
    if wrong:
        log.warning(message, urls=[worker.url for worker in wrong], **found)
        await publisher.drop_workers(wrong)
    return wrong


@dataclass
class _Delivered:
    """The scores of trainer and worker, [N] each, at the last version that the worker certainly had."""

    trainer: Tensor
    worker: Tensor
    noise: float
    """The root mean square of their difference without an adapter."""


class AdapterProbe:
    """The adapters' probe and what each worker answered.

    A worker starts from the scores of the model alone, without an adapter, whose differences are the numerical noise.
    While the change since the last version that it certainly had is within the noise, it is left to grow.
    """

    def __init__(self, publisher: Publisher, token_ids: Sequence[int], model_alone: Sequence[float]) -> None:
        """Make a probe.

        Args:
            publisher: knows the workers.
            token_ids: [N + 1], the probe.
            model_alone: [N], the trainer's log-probabilities of ``token_ids[1:]`` without adapters.
        """
        self._publisher = publisher
        self._token_ids = token_ids
        self._model_alone = _tensor(model_alone)
        self._last: dict[str, _Delivered] = {}
        """By the workers' URLs."""

    async def check(self, expected: Sequence[float]) -> dict[str, float]:
        """Have every worker score the probe, and drop those without the published adapter.

        Args:
            expected: [N], the trainer's log-probabilities of ``token_ids[1:]``.

        Returns:
            ``probe_difference``, the largest mean over tokens of |log pi_worker - log pi_trainer|, and
            ``probe_delivered``, the least share of the change that a worker sees, if the change can be judged.
        """
        workers = await self._publisher.registered_workers()
        results = await asyncio.gather(*(self._probe(worker, _tensor(expected)) for worker in workers))
        are_wrong = [
            difference > TOLERANCE or (share is not None and share < LEAST_SHARE) for difference, share in results
        ]
        message = "workers do not compute with the published adapter"
        for worker in await _drop(self._publisher, workers, are_wrong, message, difference_and_share=results):
            self._last.pop(worker.url, None)
        shares = [share for _, share in results if share is not None]
        return {
            "probe_difference": max(difference for difference, _ in results),
            **({"probe_delivered": min(shares)} if shares else {}),
        }

    async def _probe(self, worker: Worker, expected: Tensor) -> tuple[float, float | None]:
        """Return a worker's mean difference, and its share of the change if that can be judged."""
        if worker.url not in self._last:
            alone = await _rescored(self._publisher, worker, self._token_ids, None)
            if alone is None:
                return float("inf"), None
            noise = _root_mean_square(self._model_alone - alone)
            self._last[worker.url] = _Delivered(self._model_alone, alone, noise)
        rescored = await _rescored(self._publisher, worker, self._token_ids, ADAPTER_NAME)
        if rescored is None:
            return float("inf"), None
        last, change = self._last[worker.url], expected - self._last[worker.url].trainer
        difference = _mean_difference(rescored, expected)
        if _root_mean_square(change) <= NOISE_FACTOR * last.noise:
            return difference, None
        # Least squares of the worker's change over the trainer's.
        share = float(change @ (rescored - last.worker) / (change @ change))
        last.trainer, last.worker = expected, rescored
        return difference, share


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _mean_difference(worker: Tensor, trainer: Tensor) -> float:
    return float((worker - trainer).abs().mean())


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
