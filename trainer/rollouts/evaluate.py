"""Evaluation on held-out prompts: greedy pass@1, and avg@k and pass@k from samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.clients.data import DataClient
from services.clients.play import evaluation_seed
from services.clients.rollout import SamplingParams
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.protocol.accuracy import GREEDY, UNDECIDED, Metrics, accuracy, is_judged, macro_mean, verdicts
from services.protocol.groups import Group, TokenSequence, environment_figures
from services.protocol.prompts import Cursor, Prompt, Split
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from services.run_page.progress import Activity
from trainer.config import TrainerSettings
from trainer.rollouts.groups import LEAST_FAILURES, GroupMaker, Sampler, makers_of

log = get_logger(__name__)

PROMPTS_A_REQUEST = 256
KEPT_SAMPLES = 8
"""Prompts of an evaluation whose greedy completions are kept for people to read."""


SUMS = ("eval_prompts", "eval_left_out", "eval_over_limit")
"""The metrics of an evaluation that are counts."""


class Measured(NamedTuple):
    """The metrics of an evaluation: estimates by their names in ``grpo evaluate``, and counts and means by column."""

    estimates: Metrics
    figures: dict[str, float]

    @property
    def columns(self) -> dict[str, float]:
        """The metrics as metrics.jsonl has them, each estimate with its standard error and its interval."""
        columns = dict(self.figures)
        for name, one in self.estimates.items():
            column = "accuracy" if name == GREEDY else name.replace("@", "_at_")
            columns |= {column: one.value, f"{column}_stderr": one.stderr}
            columns |= {f"{column}_low": one.low, f"{column}_high": one.high}
        return columns


class Evaluator:
    """An evaluation of the policy that rollout workers serve, on each source's first EVAL_PROMPTS held-out prompts."""

    def __init__(
        self, settings: TrainerSettings, data: DataClient, samplers: Mapping[str, Sampler], activity: Activity
    ) -> None:
        self.settings = settings
        self.data = data
        self.makers = makers_of(settings, samplers)
        self.activity = activity
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
            return by_source[""].columns
        return macro_means(list(by_source.values())).columns | {
            f"{name}/{source}": value for source, own in by_source.items() for name, value in own.columns.items()
        }

    async def _evaluate(self, maker: GroupMaker) -> Measured:
        settings, k = maker.settings, maker.settings.eval_samples
        prompts = await self._prompts(maker.source)
        greedy = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=0.0)
        groups = await self._played(maker, prompts, greedy, 1)
        self.samples += _samples(prompts, groups)
        by_prompt = _results(groups)
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
        figures = {f"eval_{name}": value for name, value in figures.items()}
        figures["eval_over_limit"] = float(sum(result.status is RewardStatus.OVER_LIMIT for result in results))
        figures["eval_prompts"], figures["eval_left_out"] = float(len(prompts)), float(len(prompts) - judged)
        if rewards := [result.reward for result in results if result.reward is not None]:
            figures["eval_reward"] = statistics.fmean(rewards)
        sampled: list[list[RewardResult]] = []
        if k:
            sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
            sampled = _results(await self._played(maker, prompts, sampling, k))
        return Measured(accuracy(by_prompt, sampled, k, [k] if k else []), figures)

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
        seeds = [evaluation_seed(self.settings.seed, prompt) for prompt in prompts]
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


def _results(groups: Sequence[Group | None]) -> list[list[RewardResult]]:
    """Return the results of the answers of each group."""
    return [[answer.scoring for answer in _answers(group)] for group in groups]


def macro_means(sources: Sequence[Measured]) -> Measured:
    """Return the metrics of several sources: means in which each source counts the same, and sums of counts.

    A metric that a source lacks is left out.
    """
    common = [name for name in sources[0].figures if all(name in own.figures for own in sources)]
    figures = {name: [own.figures[name] for own in sources] for name in common}
    return Measured(
        macro_mean([own.estimates for own in sources]),
        {name: sum(values) if name in SUMS else statistics.fmean(values) for name, values in figures.items()},
    )
