"""The reward-server's settings."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.core.settings import DeadlineSettings, JsonObject, RewardFunctionSettings, SourcesSettings
from services.protocol.accuracy import UNDECIDED
from services.reward_columns import JUDGES
from services.sandbox.backends import BackendName, Interpreter

RELATIVE = ("judge_group",)
"""The rewards of answers relative to the others of their group, which an answer alone does not have."""
BUILT_IN = ("math", "exact_match", "format", "reasoning_gym", "reward_model", "code", *JUDGES)
_SCORES = ("reward_model", *JUDGES)
"""The rewards whose values are scores on a scale of their own, not verdicts."""
_IN_PROCESS = ("exact_match", "format", "reward_model", "code", *JUDGES)
"""The rewards that need no worker: they are safe on any text, or run it in boxes."""

_PART = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)(?:=(?P<weight>[-+]?\d*\.?\d+(?:[eE][-+]?\d{1,2})?))?")


@dataclass(frozen=True)
class WeightedFunction:
    """One part of the reward: a built-in function's name or ``module:function``, and its weight."""

    name: str
    weight: float

    @property
    def is_users(self) -> bool:
        """True for a user's function."""
        return ":" in self.name


class CodeScore(StrEnum):
    """The value of the reward `code`."""

    ALL = "all"
    SHARE = "share"


class JudgeSettings(DeadlineSettings):
    """The judge of the rewards `judge` and `judge_group`: a model behind OpenAI's API."""

    judge_url: str | None = Field(None, pattern=r"^https?://")
    """The judge's base URL, up to and with `/v1`, such as `http://127.0.0.1:30001/v1` of an engine of your own, or a
    hosted API's."""
    judge_model: str | None = None
    """The judge's name in requests."""
    judge_api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """The name of the variable that holds the judge's API key. Unset: requests have no key."""
    judge_concurrency: int = Field(16, ge=1, le=4096)
    """Requests to the judge at once; further ones wait."""
    judge_args: JsonObject = Field(default_factory=dict)
    """Further fields of every request as a JSON object, such as `{"reasoning_effort": "low"}`; null removes a field,
    such as `{"temperature": null}` for a model that refuses it. `max_tokens` is 2048 unless given, with the judge's
    reasoning; a reply that is cut off there has no verdict."""
    judge_dir: Path | None = None
    """Where the verdicts are kept, so that none is paid for twice; default `judge` in the run directory. [advanced]"""

    @property
    def judge_seconds(self) -> float:
        """Longest time from an answer's arrival to its verdict, with the wait for a place and all retries.

        An answer that takes longer has no reward. The trainer waits longer before it gives the reward-server up.
        """
        return 0.4 * self.service_deadline_seconds


class RewardSettings(RewardFunctionSettings, SourcesSettings, JudgeSettings):
    """The reward-server's environment variables."""

    accuracy_fn: str | None = None
    """The part of REWARD_FN by which an answer is right: where its value, before its weight, is at least 1. Unset:
    `math`, else the first part that has a value, except judges, `reward_model`, `format` beside others, and parts of
    negative weight. Without such a part there is no accuracy."""
    reward_workers: int = Field(2, ge=1, le=64)
    """Processes that verify the answers that exact arithmetic on plain numbers cannot decide, and run functions of your
    own; for the reward `code`, boxes that run programs. Give as many as there are cores."""
    reward_cpu_seconds: float = Field(0.25, gt=0, le=3600)
    """Processor time that one answer may take in a worker; an answer that takes more is wrong."""
    reward_timeout_seconds: float = Field(15.0, gt=0, le=3600)
    """Time by the clock that one answer may take in a worker. It limits functions that wait. An answer that takes
    longer has no reward, as the machine may be busy; processor time is the closer limit for others."""
    reward_memory_mb: int = Field(256, ge=16)
    """Memory that one answer may add to what a worker has at its start, on Linux; an answer that takes more is
    wrong."""
    reward_model: str | None = None
    """Sequence classification model of the `reward_model` reward, by hub name or directory; its one logit is the
    reward. Conversations of more tokens than it has positions, or than 32,768, have none; nothing is cut off."""

    code_score: CodeScore = CodeScore.ALL
    """The reward `code`: `all`, 1 if every test of the row passes and 0 otherwise; `share`, the share that passes, with
    which many easy tests reward a program that solves only these."""
    code_cpu_seconds: float = Field(5.0, gt=0, le=3600)
    """Processor time that a program may take for one test with standard input, or for all calls of a function; ten
    times as long by the clock. One that takes more fails the test, and so does one that only waits for so long, and 5 s
    at least."""
    code_memory_mb: int = Field(512, ge=64)
    """Memory of a program, with about 40 MB for Python; one that takes more fails the test. AGENT_COMMAND in the box of
    a task may have so much in all of its processes together, and a preset's own memory besides."""
    sandbox: BackendName = BackendName.AUTO
    """The isolation of code from the machine: `bwrap` (bubblewrap) or `landlock` (Landlock and seccomp, which default
    containers allow too). `auto` takes the first of them that keeps every attack of its check at the start;
    docs/security.md."""
    sandbox_python: str | None = None
    """The Python (3.11 or newer) that runs code, whose packages code can import; unset: the service's own.
    [advanced]"""

    @cached_property
    def interpreter(self) -> Interpreter:
        """The Python with its directories; ConfigurationError where it cannot be used."""
        return Interpreter.find(self.sandbox_python or sys.executable)

    @property
    def queue_seconds(self) -> float:
        """Longest wait of an answer for a worker, after which it comes back `overloaded`.

        With the reward `code` it waits longer, up to 120 s, where those before it may take longer.
        """
        return self.service_deadline_seconds / 15

    @property
    def functions(self) -> list[WeightedFunction]:
        """The parts of the reward, in order."""
        return parse_functions(self.reward_fn)

    @property
    def deciders(self) -> list[str]:
        """The parts of the reward of which the first that has a value says whether an answer is right."""
        if self.accuracy_fn is not None:
            return [self.accuracy_fn]
        others = _SCORES if len(self.functions) == 1 else (*_SCORES, "format")
        names = [f.name for f in self.functions if f.weight >= 0 and f.name not in others]
        return sorted(names, key=lambda name: name != "math")

    @property
    def caution(self) -> str | None:
        """A sentence about a reward that never says whether an answer is right; None for others."""
        return None if self.deciders else UNDECIDED

    @property
    def own_functions(self) -> dict[str, str]:
        """REWARD_FN of each source, if a part of it is a user's function, a judge, or runs code."""
        return {
            f"REWARD_FN of {source}" if source else "REWARD_FN": own.reward_fn
            for source, own in self.by_source().items()
            if any(function.is_users or function.name in (*JUDGES, "code") for function in own.functions)
        }

    @property
    def names(self) -> list[str]:
        """The names of the functions of all sources."""
        return sorted({function.name for own in self.by_source().values() for function in own.functions})

    @property
    def all_rewards(self) -> str:
        """REWARD_FN, or those of the sources, for messages."""
        return "; ".join(dict.fromkeys(own.reward_fn for own in self.by_source().values()))

    @property
    def judges(self) -> list[str]:
        """The judges among the parts of the reward."""
        return [function.name for function in self.functions if function.name in JUDGES]

    @property
    def is_relative(self) -> bool:
        """True if a part of the reward compares the answers of a group."""
        return any(function.name in RELATIVE for function in self.functions)

    @property
    def worker_functions(self) -> list[str]:
        """The names of the functions of all sources that run in worker processes."""
        return [name for name in self.names if name not in _IN_PROCESS]

    @field_validator("reward_fn")
    @classmethod
    def _check_functions(cls, text: str) -> str:
        parse_functions(text)
        return text

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.accuracy_fn is not None and self.accuracy_fn not in (names := [f.name for f in self.functions]):
            raise ValueError(f"ACCURACY_FN is {self.accuracy_fn}; name a part of REWARD_FN: {', '.join(names)}")
        judges = self.judges
        needed: dict[str, object] = {"JUDGE_URL": self.judge_url, "JUDGE_MODEL": self.judge_model}
        if judges and judges != list(RELATIVE):
            needed["JUDGE_RUBRIC"] = self.judge_rubric
        if missing := [name for name, value in needed.items() if value is None and judges]:
            raise ValueError(f"the judge of REWARD_FN needs {' and '.join(missing)}; see docs/guides/judge.md")
        return self


def parse_functions(text: str) -> list[WeightedFunction]:
    """Parse ``name=weight,module:function=weight``; ValueError where a name or a weight is not allowed."""
    functions: list[WeightedFunction] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or (":" not in match["name"] and match["name"] not in BUILT_IN):
            raise ValueError(
                f"{part.strip()!r} is not a reward; allowed are {', '.join(BUILT_IN)} and module:function, each with "
                f"=weight, a number, or without"
            )
        functions.append(WeightedFunction(match["name"], float(match["weight"] or 1.0)))
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"a reward occurs twice in {names}")
    return functions
