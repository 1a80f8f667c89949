"""The steps of a run as its rules read them, and the findings of the rules of rules.py, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import Any

from services.run_page.progress import rewards
from services.run_page.records import prompt_key
from services.run_page.rules import DOUBT, NOTE, RULES, WINDOW, WRONG

FORGOTTEN = 20
"""Steps after which a doubt that has not come again is a note."""
MOST_SAMPLES = 3
ORDER = (WRONG, DOUBT, NOTE)
FIRST_STEPS = 5
"""Steps with which rules compare the newest."""


def question_key(prompt: str, ground_truth: str) -> str:
    """Return the key of a question: equal ones have equal texts and answers."""
    return prompt_key(f"{prompt}\n{ground_truth}")


@dataclass
class History:
    """The steps of a run so far, and what else the rules know of it."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's, as config.json has them."""
    accuracy_before: float | None = None
    """The lower end of the interval of the accuracy before the first step."""
    held_out: frozenset[str] = frozenset()
    """The keys of evaluated prompts."""
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The records of metrics.jsonl, the newest last."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """Their facts about groups. ``again`` is added: the prompts, and those that an earlier step had served."""
    served: set[tuple[Any, ...]] = field(default_factory=set)
    """Source, epoch and position of each prompt."""
    trained: set[str] = field(default_factory=set)
    """The keys of the prompts."""
    scored: list[tuple[int, float]] = field(default_factory=list)
    """The steps with a mean reward, and that reward."""
    sources: dict[str, int] = field(default_factory=dict)
    """The newest step with a group of each source."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the record of the next step."""
        facts, step = row.get("facts") or {}, row["step"]
        prompts = [((source, epoch, position), key) for epoch, position, key, source in facts.get("prompts", ())]
        again = sum(place in self.served for place, _ in prompts)
        self.served.update(place for place, _ in prompts)
        self.trained.update(key for _, key in prompts)
        if (reward := row.get("reward_mean")) is not None:
            self.scored.append((step, reward))
        self.sources |= {name.removeprefix("groups/"): step for name in row if name.startswith("groups/")}
        self.rows.append(row)
        self.facts.append({**facts, "again": [len(prompts), again]})

    def numbers(self, column: str, steps: int = WINDOW, where: str | None = None) -> list[float]:
        """Return the column's numbers in the newest steps that have one; with ``where``, if that column is not 0."""
        rows = [row for row in self.rows[-steps:] if where is None or row.get(where)]
        return [row[column] for row in rows if row.get(column) is not None]

    def first(self, column: str) -> list[float]:
        """Return the column's numbers in the first FIRST_STEPS steps that have one."""
        return [*islice((row[column] for row in self.rows if row.get(column) is not None), FIRST_STEPS)]

    def sums(self, name: str, steps: int = WINDOW) -> list[float]:
        """Return the sums of a fact over the newest steps; zeros where no step has it."""
        rows = (facts.get(name, ()) for facts in self.facts[-steps:])
        return [sum(column) for column in zip_longest(*rows, fillvalue=0.0)] or [0.0] * 8

    def examples(self, name: str, steps: int) -> Iterator[str]:
        """Yield the newest steps' examples of a fact, such as ``step 3: r-0-17``."""
        for row, facts in zip(self.rows[-steps:], self.facts[-steps:], strict=True):
            yield from (f"step {row['step']}: {group}" for group in facts.get("examples", {}).get(name, ()))

    @property
    def is_on_policy(self) -> bool:
        """True if each token is trained on once, by the policy that sampled it."""
        updates = self.settings.get("updates_per_batch", 1) * self.settings.get("epochs_per_batch", 1)
        return updates == 1 and not any(self.numbers("staleness_max", 5))

    @property
    def rewards(self) -> Counter[float]:
        """The number of completions by reward in the newest three steps."""
        return rewards(self.rows[-3:])


@dataclass(frozen=True)
class Finding:
    """A rule that found something, with its evidence: numbers, steps, and up to three groups by name."""

    rule: str
    severity: str
    certainty: str
    first_step: int
    last_step: int
    evidence: str
    samples: tuple[str, ...]
    cause: str
    remedy: str

    def __str__(self) -> str:
        """Return the finding as one line."""
        one = self.first_step == self.last_step
        steps = f"step {self.first_step}" if one else f"steps {self.first_step} to {self.last_step}"
        samples = f" ({', '.join(self.samples)})" if self.samples else ""
        cause = f" Its cause is {self.certainty}: {self.cause}." if self.cause else ""
        return f"{self.severity}: {self.rule}, {steps}: {self.evidence}{samples}.{cause} {self.remedy}."


class Diagnosis:
    """The findings of a run, step by step."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._found: dict[str, Finding] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Judge the next step."""
        run = self.history
        run.add(row)
        for rule in RULES:
            if (evidence := next(rule.check(run), None)) is None:
                continue
            before = self._found.get(rule.name)
            severities = [evidence.severity or rule.severity, *([before.severity] if before else [])]
            samples = [*(before.samples if before else ()), *run.examples(evidence.fact, evidence.steps)]
            self._found[rule.name] = Finding(
                rule.name,
                min(severities, key=ORDER.index),
                rule.certainty,
                before.first_step if before else run.rows[-evidence.steps :][0]["step"],
                row["step"],
                evidence.text,
                tuple(dict.fromkeys(samples))[:MOST_SAMPLES],
                rule.cause,
                evidence.remedy or rule.remedy,
            )

    def findings(self) -> list[Finding]:
        """Return the findings, the most severe first; a doubt that has not come for FORGOTTEN steps is a note."""
        oldest = self.history.rows[-FORGOTTEN]["step"] if len(self.history.rows) >= FORGOTTEN else 0
        judged = [
            replace(found, severity=NOTE) if found.severity == DOUBT and found.last_step < oldest else found
            for found in self._found.values()
        ]
        return sorted(judged, key=lambda found: (ORDER.index(found.severity), found.first_step))
