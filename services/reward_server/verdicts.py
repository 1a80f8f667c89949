"""The verdicts of a judge on the disk, and figures of what they cost."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from prometheus_client import Counter
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

_SCORES = TypeAdapter(dict[str, Annotated[float, Field(ge=0, le=1)]])
_MOST_TOKENS = 2**31
"""No reply costs more, whatever the judge says."""


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
    """The cost of a judge since the start of this process."""

    counts: Tally[str] = field(default_factory=Tally)

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
