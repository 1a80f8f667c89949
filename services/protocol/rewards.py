"""Rewards: results of scoring, the requests and replies of the reward-server, and estimates of accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from enum import StrEnum
from math import comb, hypot, sqrt
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from services.protocol.base import Count, Finite, WireModel
from services.protocol.prompts import Prompt


class FinishReason(StrEnum):
    """The reason why a completion ended: an end token, the length limit, or an abort (its tokens are partial)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


LARGEST_REWARD = 1e30
"""The largest size of a reward. Squares of larger ones may overflow; then their group gives nothing to learn from."""


class RewardStatus(StrEnum):
    """The outcome of scoring an answer: it was scored, it exceeds a limit itself, or a service or an agent failed.

    An answer ``over_limit`` is wrong, in training as in an evaluation: it took more processor time or memory of the
    verifier, or more turns, tokens or time of an episode, than is allowed. The others, ``timeout`` (a verifier's time
    by the clock, which a busy machine takes as well), ``error`` and ``overloaded``, say nothing about the answer.
    Nobody asked for the score of an ``unasked`` one, because the run learns from a teacher alone.
    """

    SCORED = "scored"
    OVER_LIMIT = "over_limit"
    TIMEOUT = "timeout"
    ERROR = "error"
    OVERLOADED = "overloaded"
    UNASKED = "unasked"


class RewardResult(WireModel):
    """The verifier's result for one answer; ``reward`` is None unless ``status`` is ``scored``.

    An answer over a limit gets a reward from the trainer, which knows the rewards of its group.

    ``components`` has the value of each reward function by name: None if it does not apply to the row, or failed.
    ``failed`` has the status of those that failed, by name, so that the two differ. ``decided_by`` names the component
    that says whether the answer is right: "" if none does, None if the reward itself does. ``extracted`` is the answer
    that was read from the response. ``reason`` says why the answer could not be scored, or how it was judged.
    """

    reward: Finite | None
    status: RewardStatus = RewardStatus.SCORED
    components: dict[str, Finite | None] = Field(default_factory=dict)
    decided_by: str | None = Field(default=None, exclude_if=lambda name: name is None)
    failed: dict[str, RewardStatus] = Field(default_factory=dict, exclude_if=lambda failed: not failed)
    extracted: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _reward_matches_status(self) -> Self:
        is_scored = self.status is RewardStatus.SCORED
        if is_scored if self.reward is None else not (is_scored or self.status is RewardStatus.OVER_LIMIT):
            raise ValueError(f"reward {self.reward} does not fit status {self.status.value}")
        return self


UNASKED = RewardResult(reward=None, status=RewardStatus.UNASKED)
"""The result of an answer that nobody scores."""


class RewardItem(WireModel):
    """An answer to score; trainers give tokens and finish reason, so that rewards for length count tokens.

    ``row`` is the JSON text of the dataset's row that the prompt was made of; None without one. In a
    ``BatchRewardRequest`` it is the key of that text in ``rows``. The REWARD_FN of ``source`` scores it.
    """

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None
    row: str | None = Field(default=None, exclude_if=lambda row: row is None)
    source: str = Field(default="", exclude_if=lambda source: not source)

    @classmethod
    def of(cls, prompt: Prompt, response: str, **counts: Any) -> Self:
        """Return the item of an answer to ``prompt``; ``counts`` are its tokens and its finish reason."""
        return cls(
            prompt=prompt.prompt,
            response=response,
            ground_truth=prompt.ground_truth,
            row=prompt.row_text,
            source=prompt.source,
            **counts,
        )


ARGUMENTS = tuple(name for name in RewardItem.model_fields if name != "source")
"""The fields of an item that reward functions get by name. ``source`` is a usual name of a column."""


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward. ``rows`` has each row's JSON text once, by any key; items name their row by key.

    With ``is_group`` the items are all answers to one prompt, and get the rewards that are relative to the group, too.
    ``own_rewards``, one an item of a group, are those that an agent gave; the relative rewards are added to them.
    """

    items: list[RewardItem] = Field(max_length=65_536)
    rows: dict[str, str] = Field(default_factory=dict, exclude_if=lambda rows: not rows)
    is_group: bool = Field(default=False, exclude_if=lambda value: not value)
    own_rewards: list[Finite] | None = Field(default=None, exclude_if=lambda value: value is None)

    @classmethod
    def of(cls, items: Sequence[RewardItem], **fields: Any) -> Self:
        """Return the request for items that have the texts of their rows; ``fields`` are its others."""
        keys = {text: str(number) for number, text in enumerate(dict.fromkeys(i.row for i in items if i.row))}
        if not keys:
            return cls(items=list(items), **fields)
        named = [item.model_copy(update={"row": keys[item.row]}) if item.row else item for item in items]
        return cls(items=named, rows={key: text for text, key in keys.items()}, **fields)

    @model_validator(mode="after")
    def _rows_are_there(self) -> Self:
        if unknown := {item.row for item in self.items if item.row is not None} - self.rows.keys():
            raise ValueError(f"an item names row {min(unknown)!r}, which `rows` lacks; give its JSON text there")
        return self

    @model_validator(mode="after")
    def _is_one_group(self) -> Self:
        if self.is_group and len({(item.source, item.prompt) for item in self.items}) > 1:
            raise ValueError("a group has the answers to one prompt of one source; send one request a prompt")
        if self.own_rewards is not None and (not self.is_group or len(self.own_rewards) != len(self.items)):
            raise ValueError("own_rewards are one an item of a group; set is_group")
        return self

    @property
    def whole_items(self) -> list[RewardItem]:
        """The items with the texts of their rows."""
        if not self.rows:
            return self.items
        return [
            item if item.row is None else item.model_copy(update={"row": self.rows[item.row]}) for item in self.items
        ]


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]


class RewardStats(BaseModel):
    """The fields of the reward-server's GET /stats that clients read."""

    relative: list[str] = Field(default_factory=list)
    """The sources with a part of the reward that compares the answers of a group; "" without sources."""
    judge: dict[str, float] | None = None
    """Figures of the judge; None without one."""


CORRECT = 1.0 - 1e-9
"""The lowest reward of a right answer, or the lowest value, before its weight, of the component that decides."""

Z = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""

UNDECIDED = (
    "no part of REWARD_FN says whether an answer is right, so there is no accuracy, no best checkpoint and no "
    "curriculum, and TARGET_ACCURACY is never reached; name the part that does with ACCURACY_FN"
)


def is_judged(result: RewardResult | None) -> bool:
    """Return whether the answer was judged: no service and no agent failed."""
    return result is not None and result.status in (RewardStatus.SCORED, RewardStatus.OVER_LIMIT)


def is_correct(result: RewardResult) -> bool | None:
    """Return whether the answer is right, or None if it was not judged, or if no component says so.

    An answer over a limit is wrong for any reward that training gives it: if it were excluded, a model could raise its
    accuracy by writing answers that cannot be verified.
    """
    if result.status is RewardStatus.OVER_LIMIT:
        return False
    value = result.reward if result.decided_by is None else result.components.get(result.decided_by)
    return None if result.reward is None or value is None else value >= CORRECT


def verdicts(results: Sequence[RewardResult]) -> list[bool]:
    """Return ``is_correct`` of the answers that have it; none where no part of REWARD_FN decides."""
    if any(result.decided_by == "" for result in results):
        return []
    return [right for result in results if (right := is_correct(result)) is not None]


def standard_error(scores: Sequence[float]) -> float:
    """Return the standard error of the mean of ``scores``, one score a prompt: sqrt(sum (s - mean)^2) / n.

    For scores of 0 and 1 this is the binomial sqrt(p (1 - p) / n). For avg@k and pass@k it is clustered by prompt: the
    samples of a prompt depend on each other, so they make one score (Miller 2024, arXiv:2411.00640).

    Raises:
        StatisticsError: there are no scores.
    """
    return statistics.pstdev(scores) / sqrt(len(scores))


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95% interval of the mean of ``scores``, one score from 0 to 1 a prompt.

    Wilson's score interval (1927), which lies within 0 and 1 and has a width also at 0 and at 1. Scores between 0 and 1
    vary less than right and wrong answers of the same mean. Like as many of those they count as have the same standard
    error: p (1 - p) / stderr^2 (Kish's effective sample size).

    Raises:
        StatisticsError: there are no scores.
    """
    mean, error = statistics.fmean(scores), standard_error(scores)
    n = mean * (1 - mean) / error**2 if error > 0 else len(scores)
    middle = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


class Estimate(BaseModel):
    """A mean over ``prompts`` prompts with its standard error and the ends of its interval."""

    value: float
    stderr: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of ``scores``, one score from 0 to 1 a prompt, with its ``standard_error`` and ``interval``.

    Raises:
        StatisticsError: there are no scores.
    """
    low, high = interval(scores)
    mean, error = statistics.fmean(scores), standard_error(scores)
    return Estimate(value=mean, stderr=error, low=low, high=high, prompts=len(scores))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate, from n samples, of the probability that at least one of k samples is right.

    Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} right of {n} samples; needed is 1 <= k <= n")
    return 1.0 - comb(n - correct, k) / comb(n, k)


Metrics = dict[str, Estimate]
"""Estimates by the name of their metric."""
GREEDY = "greedy pass@1"


def accuracy(
    greedy: Sequence[Sequence[RewardResult]], sampled: Sequence[Sequence[RewardResult]], n: int, ks: Sequence[int]
) -> Metrics:
    """Return greedy pass@1 (``GREEDY``), then ``avg@n``, and ``pass@k`` for each k.

    Each metric is over the prompts that have enough judged answers for it; a metric without such a prompt is left out,
    and so are all of them if no part of REWARD_FN says whether an answer is right.

    Args:
        greedy: the results of each prompt's answers at temperature 0.
        sampled: the results of its answers at another temperature.
        n: answers of that kind that each prompt should have.
        ks: each at most ``n``.
    """
    if any(result.decided_by == "" for results in (*greedy, *sampled) for result in results):
        return {}
    judged = [rights for results in sampled if (rights := verdicts(results))]
    scores = {GREEDY: [float(right) for results in greedy for right in verdicts(results)]}
    if n:
        scores[f"avg@{n}"] = [statistics.fmean(rights) for rights in judged]
    for k in ks:
        scores[f"pass@{k}"] = [pass_at_k(len(rights), sum(rights), k) for rights in judged if len(rights) >= k]
    return {name: estimate(values) for name, values in scores.items() if values}


def macro_mean(sources: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric over sources, in which each counts the same, whatever its number of prompts.

    The estimates are independent, so that the variance of their mean is the sum of their variances / n^2. The interval
    is the normal one within 0 and 1, because Wilson's is of one proportion. A metric that a source lacks is left out.
    """
    means: Metrics = {}
    for name in sources[0]:
        parts = [metrics[name] for metrics in sources if name in metrics]
        if len(parts) == len(sources):
            value = statistics.fmean(part.value for part in parts)
            error = hypot(*(part.stderr for part in parts)) / len(parts)
            low, high = max(value - Z * error, 0.0), min(value + Z * error, 1.0)
            means[name] = Estimate(value=value, stderr=error, low=low, high=high, prompts=sum(p.prompts for p in parts))
    return means
