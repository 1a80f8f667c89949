"""The verdicts of a judge on the disk, and figures of what they cost and how far their scores can be trusted."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated

from prometheus_client import Counter, Gauge
from pydantic import Field, TypeAdapter

from services.core.logs import get_logger
from services.http.database import Database
from services.http.problems import ProblemError
from services.protocol.chat import ChatReply

log = get_logger(__name__)

CALLS = Counter("reward_judge_calls", "Replies of the judge, usable or not.")
TOKENS = Counter("reward_judge_tokens", "Tokens that the judge's replies cost, by kind.", ["kind"])
HITS = Counter("reward_judge_hits", "Verdicts that were there already, or shared with an equal request under way.")
FAILURES = Counter("reward_judge_failures", "Answers, or whole groups, without a verdict, by reason.", ["reason"])
AGREEMENT = Gauge(
    "reward_judge_order_agreement", "Mean Kendall tau-b of a group's scores in two orders (JUDGE_SECOND_ORDER)."
)
LENGTH = Gauge("reward_judge_length_correlation", "Correlation of the judge's scores with the answers' lengths.")

_SCORES = TypeAdapter(dict[str, Annotated[float, Field(ge=0, le=1)]])
_MOST_TOKENS = 2**31
"""No reply costs more, whatever the judge says."""
WATCHED = 1000
"""The newest scores, and agreements, that the figures are of."""


@dataclass(frozen=True)
class Verdict:
    """Scores from 0 to 1 by name, and the judge's reasons."""

    scores: dict[str, float]
    reason: str = ""


class Verdicts(Database):
    """The database of the verdicts, with what each cost."""

    name = "verdicts"
    variable = "JUDGE_DIR"
    format = 1
    schema = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY,         -- digest of the request
    model TEXT NOT NULL,          -- the name that the judge answered with
    scores TEXT NOT NULL,         -- JSON: scores by criterion, or by an answer's id
    reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    made REAL NOT NULL            -- Unix seconds
);
"""
    unwritten = "the reward-server cannot write its verdicts"
    loss = "its verdicts are lost, and are paid for again"

    async def find(self, key: str, names: Sequence[str]) -> Verdict | None:
        """Return the verdict of a key, if it is there with a score from 0 to 1 for each of ``names``."""
        for scores, reason in await self.read("SELECT scores, reason FROM verdicts WHERE key = ?", key):
            with contextlib.suppress(ValueError):
                found = _SCORES.validate_json(scores)
                if found.keys() == set(names):
                    return Verdict(found, str(reason))
        return None

    async def last_model(self) -> str | None:
        """Return the name of the model that gave the newest verdict."""
        rows = await self.read("SELECT model FROM verdicts ORDER BY rowid DESC LIMIT 1")
        return str(rows[0][0]) if rows else None

    async def keep(self, key: str, verdict: Verdict, model: str, cost: Sequence[int]) -> None:
        """Write a verdict with its tokens of prompts and replies; on a disk that refuses, log that it is not kept."""
        row = (key, model, json.dumps(verdict.scores), verdict.reason, *cost, time.time())
        try:
            await self.write(("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?)", row))
        except ProblemError as error:
            # The verdict is good all the same.
            log.error("a verdict is not kept", reason=str(error.detail))


@dataclass
class Figures:
    """The cost of a judge and how far its scores can be trusted, since the start of this process."""

    counts: Tally[str] = field(default_factory=Tally)
    lengths: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WATCHED))
    """The score of each answer, and its length in characters."""
    agreements: deque[float] = field(default_factory=lambda: deque(maxlen=WATCHED))

    def count(self, reply: ChatReply) -> tuple[int, int]:
        """Count a reply, and return the tokens of its prompt and of its text."""
        usage = reply.usage
        told = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        tokens = (min(max(told[0], 0), _MOST_TOKENS), min(max(told[1], 0), _MOST_TOKENS))
        CALLS.inc()
        for kind, number in zip(("prompt", "completion"), tokens, strict=True):
            TOKENS.labels(kind).inc(number)
        self.counts.update(judge_calls=1, judge_tokens=sum(tokens))
        return tokens

    def hit(self) -> None:
        """Count a verdict that cost nothing."""
        HITS.inc()
        self.counts["judge_hits"] += 1

    def fail(self, label: str) -> None:
        """Count an answer, or a group, without a verdict."""
        FAILURES.labels(label).inc()
        self.counts.update({"judge_failures": 1, f"judge_failures_{label}": 1})

    def watch(self, score: float, text: str) -> None:
        """Note the score of an answer."""
        self.lengths.append((score, float(len(text))))
        LENGTH.set(self.length_correlation or 0.0)

    def compare(self, first: Sequence[float], second: Sequence[float]) -> None:
        """Note the scores of one group in two orders."""
        if (tau := kendall(first, second)) is not None:
            self.agreements.append(tau)
            AGREEMENT.set(statistics.fmean(self.agreements))

    @property
    def length_correlation(self) -> float | None:
        """Pearson's correlation of score and length; None while either is constant."""
        try:
            return statistics.correlation(*zip(*self.lengths, strict=True))
        except (TypeError, statistics.StatisticsError):
            return None

    def stats(self) -> dict[str, float]:
        """Return the figures by name."""
        figures: dict[str, float | None] = dict(self.counts)
        figures["judge_length_correlation"] = self.length_correlation
        figures["judge_order_agreement"] = statistics.fmean(self.agreements) if self.agreements else None
        return {name: value for name, value in figures.items() if value is not None}


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two scorings of the same answers, -1 to 1; None if either scores all of them alike.

    Kendall 1945, Biometrika 33, 239: pairs in the same order less those in the opposite one, over the geometric mean of
    the pairs that each scoring orders.
    """
    pairs = [
        (math.copysign(a != b, a - b), math.copysign(c != d, c - d))
        for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)
    ]
    ordered = math.sqrt(sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs))
    return sum(x * y for x, y in pairs) / ordered if ordered else None
