"""The metrics of a step: its groups, its updates, its time."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from services.core.tasks import TIMELINE
from services.protocol.groups import Group, TokenSequence, environment_figures
from services.protocol.rewards import UNASKED, FinishReason, RewardStatus
from trainer.model.learner import UpdateResult

JUDGED = (RewardStatus.SCORED, RewardStatus.UNASKED)
"""The statuses of scoring that are not failures."""
HISTOGRAM_BARS = 20
REWARD_DIGITS = 6
EXAMPLE_CHARACTERS = 500

HEADLINE = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "loss": "loss",
    "entropy": "entropy",
    "length_mean": "length",
    "staleness_max": "staleness",
}
"""The metrics in a step's line of the log, with their names there."""
SOURCES_HEADLINE = ("reward_mean", "accuracy")
"""The metrics that the line has of each source, too."""

PHASES = (
    *("fetch", "generate", "score", "store", "wait", "teach", "replay"),
    *("reference", "values", "train", "publish", "evaluate", "record", "save"),
)
"""The phases of a step: ``seconds_<phase>`` among the metrics. Together they are all of ``seconds_step``."""
SHOWN_SHARE = 0.01
"""Smallest share of a step's seconds with which a phase is in the step's line of the log."""


class StepClock:
    """The seconds of the steps by phase.

    Every moment belongs to the phase that was entered last, so that no second is lost between two phases. A step lasts
    from the end of the record before it to the end of its own, and so includes the checkpoint after the step before.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Count the time from here on towards ``phase``."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        TIMELINE.add("phases", self.phase, self._since, now)
        self.phase, self._since = phase, now

    def move(self, seconds: float, phase: str) -> None:
        """Count the last ``seconds`` of the phase that is under way towards ``phase`` instead."""
        self._seconds[self.phase] -= seconds
        self._seconds[phase] += seconds

    def lap(self) -> dict[str, float]:
        """Return the metrics of the time since the last lap, ``seconds_<phase>`` and ``seconds_step``; begin anew."""
        self.enter(self.phase)
        seconds = {phase: self._seconds[phase] for phase in PHASES if phase in self._seconds}
        self._seconds.clear()
        return {f"seconds_{phase}": value for phase, value in (*seconds.items(), ("step", sum(seconds.values())))}


BY_SOURCE = (
    *("reward_mean", "reward_std", "reward_trained_mean", "completions", "unscorable", "over_limit"),
    *("length_mean", "length_max", "truncation_rate", "completion_tokens", "prompt_tokens"),
    *("groups", "zero_variance_groups", "staleness_mean", "staleness_max"),
)
"""The metrics of groups that each source has, too."""


OF_SAMPLES = ("unscorable", "over_limit", "truncation_rate", "zero_variance_groups", "staleness_mean", "staleness_max")
"""The metrics of groups that say nothing of what no policy has sampled."""


def step_metrics(
    groups: Sequence[Group],
    scored: Sequence[Group],
    update: UpdateResult,
    policy_version: int,
    *,
    is_sampled: bool = True,
) -> dict[str, float]:
    """Return the metrics of a step's groups and of its update.

    Args:
        groups: the groups to train on, not empty.
        scored: with dynamic sampling these, and the groups that it dropped.
        update: of the step's groups and the replayed ones.
        policy_version: the version that the update made.
        is_sampled: a policy sampled the groups.
    """
    of_groups = group_metrics(groups, policy_version - 1, scored) | source_metrics(groups, policy_version - 1, scored)
    left_out = () if is_sampled else OF_SAMPLES
    return {
        **{name: value for name, value in of_groups.items() if name.partition("/")[0] not in left_out},
        **update.metrics,
        "updates_skipped": float(update.skipped),
        "trained_tokens": float(update.tokens),
        "trained_tokens_per_second": update.tokens / max(update.seconds, 1e-9),
        "policy_version": float(policy_version),
        "peak_memory_bytes": float(peak_memory_bytes()),
    }


def headline(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a step's figures for its line of the log: HEADLINE with three digits, then the seconds by phase.

    Phases with less than SHOWN_SHARE of the step are left out.
    """
    line = {
        name.replace(column, short): f"{value:.3g}"
        for column, short in HEADLINE.items()
        for name, value in metrics.items()
        if name == column or (column in SOURCES_HEADLINE and name.startswith(f"{column}/"))
    }
    least = SHOWN_SHARE * metrics.get("seconds_step", 0.0)
    seconds = {phase: metrics.get(f"seconds_{phase}", 0.0) for phase in PHASES}
    return line | {
        phase: f"{value:.2f}s"
        for phase, value in (*seconds.items(), ("step", metrics.get("seconds_step", 0.0)))
        if value > least
    }


def group_metrics(groups: Sequence[Group], policy_version: int, scored: Sequence[Group] = ()) -> dict[str, float]:
    """Return the metrics of a batch of groups; means are over completions unless named otherwise.

    An agent's episode counts as one completion, as long as the tokens that the policy sampled in its sequences.
    Statistics of completions are over all that were made. A better policy loses its best groups to dynamic sampling, so
    the reward of those that are left (``reward_trained_mean``) hardly rises.

    Args:
        groups: the groups to train on, not empty.
        policy_version: the version in training, from which staleness is counted.
        scored: with dynamic sampling these, and the groups that it dropped.
    """
    staleness = [policy_version - g.policy_version for g in groups]
    of_groups = {
        "groups": float(len(groups)),
        "zero_variance_groups": float(sum(_has_equal_rewards(g) for g in groups)),
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": float(max(staleness)),
    }
    if scored and (trained := _rewards(groups)):
        of_groups["reward_trained_mean"] = statistics.fmean(trained)
    return of_groups | _completion_metrics(scored or groups)


def source_metrics(groups: Sequence[Group], policy_version: int, scored: Sequence[Group] = ()) -> dict[str, float]:
    """Return the metrics BY_SOURCE of each source, as in ``reward_mean/maths``, and its epoch; none without SOURCES.

    The arguments are those of ``group_metrics``.
    """
    metrics: dict[str, float] = {}
    for source in sorted({group.prompt.source for group in groups} - {""}):
        own, made = ([group for group in some if group.prompt.source == source] for some in (groups, scored))
        figures = group_metrics(own, policy_version, made) | {"epoch": float(max(g.prompt.epoch for g in own))}
        metrics |= {f"{name}/{source}": figures[name] for name in (*BY_SOURCE, "epoch") if name in figures}
    return metrics


def _completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    episodes = [sequences for g in groups for sequences in g.episodes]
    rewards = _rewards(groups)
    lengths = [sum(e.trained_tokens for e in sequences) for sequences in episodes]
    metrics = {
        "completions": float(len(episodes)),
        "unscorable": float(len(episodes) - len(rewards) - sum(first.result == UNASKED for first, *_ in episodes)),
        "over_limit": float(sum(first.scoring.status is RewardStatus.OVER_LIMIT for first, *_ in episodes)),
        "completion_tokens": float(sum(lengths)),
        "prompt_tokens": float(sum(len(g.prompt_ids) for g in groups)),
        "length_mean": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "truncation_rate": statistics.fmean(
            any(e.finish_reason is FinishReason.LENGTH for e in sequences) for sequences in episodes
        ),
    }
    if rewards:
        metrics["reward_mean"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
        metrics["reward_q10"], metrics["reward_q90"] = map(float, np.quantile(rewards, (0.1, 0.9)))
    return (
        metrics
        | _episode_metrics(groups)
        | environment_figures(groups)
        | _win_rates(groups)
        | _reward_parts([sequences[0] for sequences in episodes])
    )


def _has_equal_rewards(group: Group) -> bool:
    """Return whether no two episodes of the same seat have different rewards."""
    scored = {(e.seat, e.reward) for e in group.sequences if e.reward is not None}
    return len(scored) == len({seat for seat, _ in scored})


def _episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of agents' episodes; none without an agent."""
    figures = [figures for group in groups for figures in (group.episode_figures or {}).values()]
    if not figures:
        return {}
    parsed = sum(f.tool_calls for f in figures)
    written = parsed + sum(f.unparsed_tool_calls for f in figures)
    failed = sum((Count(group.episodes_failed) for group in groups), Count())
    metrics = {
        "turns_mean": statistics.fmean(f.turns for f in figures),
        "turns_max": float(max(f.turns for f in figures)),
        "tool_calls_mean": written / len(figures),
        "branches_mean": statistics.fmean(f.branches for f in figures),
        "episode_calls_repeated": float(sum(f.calls_repeated for f in figures)),
        "episodes_failed": float(failed.total()),
        **{f"episodes_failed_{reason}": float(count) for reason, count in failed.items()},
    }
    return metrics | ({"tool_calls_parsed": parsed / written} if written else {})


def _win_rates(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of games that each seat won, whether it acted or not; nothing without games."""
    won: defaultdict[int, list[bool]] = defaultdict(list)
    for group in groups:
        for episode in (group.episode_figures or {}).values():
            if episode.seat is not None and episode.won is not None:
                won[episode.seat].append(episode.won)
    return {f"win_rate_seat_{seat}": statistics.fmean(games) for seat, games in sorted(won.items())}


def _reward_parts(experiences: Sequence[TokenSequence]) -> dict[str, float]:
    """Return the mean value of each reward function before its weight; nothing where there is only one function."""
    by_function: defaultdict[str, list[float]] = defaultdict(list)
    for experience in experiences:
        for name, value in experience.scoring.components.items():
            if value is not None:
                by_function[name].append(value)
    if len(by_function) < 2:
        return {}
    return {f"reward_part_{name}": statistics.fmean(values) for name, values in by_function.items()}


def reward_counts(groups: Sequence[Group]) -> list[tuple[float, int]]:
    """Return how many completions have each reward, as (reward, count) in ascending order.

    Rewards are rounded to REWARD_DIGITS digits, so that sums of the same parts are the same reward. More than
    HISTOGRAM_BARS different rewards are counted in that many intervals of equal width, each under its middle.
    """
    rewards = [_rounded(reward) for reward in _rewards(groups)]
    if len(set(rewards)) > HISTOGRAM_BARS:
        low, width = min(rewards), (max(rewards) - min(rewards)) / HISTOGRAM_BARS
        places = (min(int((reward - low) / width), HISTOGRAM_BARS - 1) for reward in rewards)
        rewards = [_rounded(low + (place + 0.5) * width) for place in places]
    return sorted(Count(rewards).items())


def failures(groups: Sequence[Group]) -> list[tuple[str, int, str]]:
    """Return (reason, count, what one of them says) of failed completions, the most frequent reason first.

    Completions over a limit are among them, although they have a reward.

    An agent's episode has the reason that ``Group.episodes_failed`` counts; another completion has ``reward_`` with the
    status of its scoring.
    """
    counts: Count[str] = Count()
    examples: dict[str, str] = {}
    for group in groups:
        if group.episodes_failed is not None:
            counts.update(group.episodes_failed)
            examples = (group.failure_examples or {}) | examples
            continue
        for result in (e.scoring for e in group.sequences if e.scoring.status not in JUDGED):
            reason = f"reward_{result.status.value}"
            counts[reason] += 1
            examples.setdefault(reason, result.reason or "")
    texts = {reason: " ".join(text.split())[:EXAMPLE_CHARACTERS] for reason, text in examples.items()}
    return [(reason, count, texts.get(reason, "")) for reason, count in counts.most_common()]


def _rewards(groups: Sequence[Group]) -> list[float]:
    return [reward for group in groups for reward in group.rewards if not math.isnan(reward)]


def _rounded(reward: float) -> float:
    return float(f"{reward:.{REWARD_DIGITS}g}")


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held, or its GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
