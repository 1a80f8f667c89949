"""Evaluation on held-out prompts: greedy pass@1, and avg@k and pass@k from samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from services.clients.data import DataClient
from services.clients.rollout import SamplingParams
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.protocol.base import derive_seed
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor, Prompt, Split
from services.protocol.rewards import (
    UNDECIDED,
    FinishReason,
    RewardResult,
    RewardStatus,
    estimate,
    is_judged,
    pass_at_k,
    verdicts,
)
from services.run_page.activity import Activity
from services.run_page.progress import of_sources
from trainer.checkpoints.checkpoint import RunState
from trainer.config import TrainerSettings
from trainer.reporting.step_metrics import environment_figures
from trainer.rollouts.groups import LEAST_FAILURES, GroupMaker, Sampler, makers_of

log = get_logger(__name__)

PROMPTS_A_REQUEST = 256
KEPT_SAMPLES = 8
"""Prompts of an evaluation whose greedy completions are kept for people to read."""


class Evaluator:
    """An evaluation of the policy that rollout workers serve, on each source's first EVAL_PROMPTS held-out prompts."""

    def __init__(
        self,
        settings: TrainerSettings,
        data: DataClient,
        samplers: Mapping[str, Sampler],
        activity: Activity | None = None,
    ) -> None:
        self.settings = settings
        self.data = data
        self.makers = makers_of(settings, samplers)
        self.activity = activity or Activity()
        self.samples: list[dict[str, Any]] = []
        """Greedy completions of the newest evaluation's first prompts of each source, the same ones each time."""
        self.failure: str | None = None
        """Why the newest evaluation has no accuracy; None if it has one."""

    async def evaluate(self) -> dict[str, float]:
        """Measure ``accuracy`` (greedy pass@1), its standard error, its interval and the counts behind it.

        With SOURCES the metrics of each are named as in ``accuracy/maths``, and ``accuracy`` is their macro mean, in
        which each source counts the same, whatever the number of its prompts.

        An environment's figures are means over the greedy episodes (``eval_environment_...``).
        With EVAL_SAMPLES k, also measure ``avg_at_k`` and ``pass_at_k``.

        An answer over a limit of the verifier or of an episode is wrong (``eval_over_limit``). A prompt without a
        completion, or whose completion the reward-server failed to score, is left out (``eval_left_out``).

        Raises:
            DependencyLostError: a service was lost, or no prompt got a completion.
            ConfigurationError: every answer failed, of LEAST_FAILURES prompts or more.
        """
        self.samples, self.failure = [], None
        by_source = {source: await self._evaluate(maker) for source, maker in self.makers.items()}
        if self.settings.sources is None:
            return by_source[""]
        return macro_means(list(by_source.values())) | {
            f"{name}/{source}": value for source, metrics in by_source.items() for name, value in metrics.items()
        }

    async def _evaluate(self, maker: GroupMaker) -> dict[str, float]:
        settings = maker.settings
        prompts = await self._prompts(maker.source)
        greedy = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=0.0)
        groups = await self._played(maker, prompts, greedy, 1)
        self.samples += _samples(prompts, groups)
        by_prompt = [[answer.scoring for answer in _answers(group)] for group in groups]
        results = [result for of_prompt in by_prompt for result in of_prompt]
        rights = verdicts(results)
        judged = sum(bool(verdicts(of_prompt) if rights else any(map(is_judged, of_prompt))) for of_prompt in by_prompt)
        if not prompts:
            self.failure = "the data hold out no prompt; set DATASET_TEST or DATASET_HELD_OUT"
        elif not judged:
            self.failure = str(results[0].reason if results else maker.last_failure)
        elif not rights:
            self.failure = UNDECIDED
        figures = environment_figures([group for group in groups if group is not None])
        metrics = greedy_metrics(results) | {f"eval_{name}": value for name, value in figures.items()}
        metrics |= {
            "eval_prompts": float(len(prompts)),
            "eval_left_out": float(len(prompts) - judged),
        }
        k = settings.eval_samples
        if k:
            sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
            sampled = await self._played(maker, prompts, sampling, k)
            samples = [[answer.scoring for answer in _answers(group)] for group in sampled]
            metrics |= sample_metrics(samples, k) if rights or not judged else {}
        return metrics

    async def _prompts(self, source: str) -> list[Prompt]:
        prompts: list[Prompt] = []
        cursor = Cursor()
        while len(prompts) < self.settings.eval_prompts:
            wanted = min(self.settings.eval_prompts - len(prompts), PROMPTS_A_REQUEST)
            reply = await self.data.prompts(wanted, Split.TEST, cursor, source=source)
            fresh = [p for p in reply.prompts if p.epoch == 0]
            prompts += fresh
            cursor = reply.cursor
            if len(fresh) < wanted:
                break
        return prompts

    async def _played(
        self, maker: GroupMaker, prompts: Sequence[Prompt], params: SamplingParams, n: int
    ) -> list[Group | None]:
        """Answer each prompt ``n`` times."""
        maker.failed_in_a_row = 0
        seeds = [derive_seed(self.settings.seed, "evaluation", prompt.id) for prompt in prompts]
        answers = [maker.sample_group(prompt, params, n, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        of_source = f" of {maker.source}" if maker.source else ""
        groups = await self.activity.gather(answers, f"held-out prompts{of_source} answered")
        if prompts and not any(groups):
            failure = maker.all_failed()
            if len(prompts) >= LEAST_FAILURES or isinstance(failure, DependencyLostError):
                raise failure
        return groups


def _samples(prompts: Sequence[Prompt], groups: Sequence[Group | None]) -> list[dict[str, Any]]:
    """Return the answers to the first prompts, for people to read."""
    return [
        {
            "prompt": prompt.prompt,
            "ground_truth": prompt.ground_truth,
            "completion": answer.completion,
            "reward": answer.reward,
            "finish_reason": answer.finish_reason.value,
            "messages": [message.model_dump(exclude_defaults=True) for message in answer.messages or ()],
            **({"row": prompt.shown_row} if prompt.row else {}),
        }
        for prompt, group in zip(prompts[:KEPT_SAMPLES], groups, strict=False)
        for answer in _answers(group)
    ]


def _answers(group: Group | None) -> list[TokenSequence]:
    """Return the whole completions of a group, or the last sequence of each of its episodes."""
    last = [sequences[-1] for sequences in group.episodes] if group else []
    return [answer for answer in last if answer.finish_reason is not FinishReason.ABORT]


def greedy_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return accuracy and mean reward over prompts, from the one completion of each."""
    metrics = {"eval_over_limit": float(sum(result.status is RewardStatus.OVER_LIMIT for result in results))}
    metrics |= _estimate("accuracy", verdicts(results))
    if rewards := [result.reward for result in results if result.reward is not None]:
        metrics["eval_reward"] = statistics.fmean(rewards)
    return metrics


SUMS = ("eval_prompts", "eval_left_out", "eval_over_limit")
"""The metrics of an evaluation that are counts."""


def macro_means(by_source: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of an evaluation of several sources: means in which each counts the same, and sums of counts.

    Standard errors are those of a mean of independent estimates. The 95% interval of a mean is 1.96 of them to either
    side, within 0 and 1, since Wilson's is of one proportion. A metric that a source lacks is left out.
    """
    columns: dict[str, list[float]] = {}
    for metrics in by_source:
        for name, value in metrics.items():
            columns.setdefault(name, []).append(value)
    columns = {name: values for name, values in columns.items() if len(values) == len(by_source)}
    means = {name: sum(v) if name in SUMS else statistics.fmean(v) for name, v in columns.items()}
    for error in [name for name in means if name.endswith("_stderr")]:
        name = error.removesuffix("_stderr")
        means[error] = stderr = math.hypot(*columns[error]) / len(columns[error])
        means[f"{name}_low"], means[f"{name}_high"] = (
            min(max(means[name] + sign * 1.96 * stderr, 0.0), 1.0) for sign in (-1, 1)
        )
    return means


def describe_accuracy(metrics: Mapping[str, float]) -> str:
    """Return the accuracy that TARGET_ACCURACY is compared with, a point estimate, with its interval and prompts."""
    accuracy, low, high = (metrics[name] for name in ("accuracy", "accuracy_low", "accuracy_high"))
    prompts = _judged_prompts(metrics)
    interval_ = f"({low:.3f} to {high:.3f})"
    return f"greedy pass@1 of {accuracy:.3f} {interval_} on {prompts} held-out prompt{'s'[: prompts != 1]}"


def _judged_prompts(metrics: Mapping[str, float]) -> int:
    return int(metrics.get("eval_prompts", 0.0) - metrics.get("eval_left_out", 0.0))


def sample_metrics(samples: Sequence[Sequence[RewardResult]], k: int) -> dict[str, float]:
    """Return avg@k over prompts, and pass@k over those with ``k`` judged samples, with standard errors and intervals.

    Args:
        samples: each prompt's samples, ``k`` of them or fewer.
        k: samples asked for.
    """
    rights = [rights for of_prompt in samples if (rights := verdicts(of_prompt))]
    by_prompt = {
        f"avg_at_{k}": [statistics.fmean(of_prompt) for of_prompt in rights],
        f"pass_at_{k}": [pass_at_k(len(of_prompt), sum(of_prompt), k) for of_prompt in rights if len(of_prompt) >= k],
    }
    return {column: value for name, scores in by_prompt.items() for column, value in _estimate(name, scores).items()}


def _estimate(name: str, scores: Sequence[float]) -> dict[str, float]:
    """Return the mean of ``scores``, one a prompt, with its standard error and interval; nothing without scores."""
    if not scores:
        return {}
    mean = estimate(scores)
    return {name: mean.value, f"{name}_stderr": mean.stderr, f"{name}_low": mean.low, f"{name}_high": mean.high}


def note_accuracy(settings: TrainerSettings, state: RunState, metrics: Mapping[str, float]) -> None:
    """Note an evaluation's greedy pass@1 in the run's state: the newest, the best, and that before the first step.

    Without metrics the evaluation failed.
    """
    accuracy = metrics.get("accuracy")
    state.last_accuracy, state.evaluated_step = accuracy, state.step
    state.last_accuracy_low, state.last_accuracy_high = metrics.get("accuracy_low"), metrics.get("accuracy_high")
    state.last_accuracy_prompts = _judged_prompts(metrics)
    for source, value in of_sources(metrics, "accuracy").items():
        state.accuracies_by_source[source] = [*state.accuracies_by_source.get(source, [])[:1], value]
    if state.step == 0:
        state.accuracy_before = accuracy
        state.accuracy_before_low, state.accuracy_before_high = state.last_accuracy_low, state.last_accuracy_high
        state.accuracy_before_prompts = state.last_accuracy_prompts
        state.eval_reward_before = metrics.get("eval_reward")
    if accuracy is not None and accuracy > (state.best_accuracy or 0.0):
        state.best_accuracy, state.best_step = accuracy, state.step or None
        log.info("best so far", step=state.step, accuracy=describe_accuracy(metrics))
    if reached_target(settings, state):
        log.info("TARGET_ACCURACY reached", target=settings.target_accuracy, best=state.best_accuracy)


def reached_target(settings: TrainerSettings, state: RunState) -> bool:
    """Return whether an evaluation's greedy pass@1, a point estimate, was at least TARGET_ACCURACY."""
    target = settings.target_accuracy
    return target is not None and (state.best_accuracy or 0.0) >= target
