"""The facts of a run that its rules read: rows of metrics.jsonl, step by step, and sums over the newest of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from services.run_page.records import prompt_key

WINDOW = 20
"""Steps over which facts about groups are added up."""
FIRST, FIRST_STEPS = ("kl_behaviour", "truncation_rate", "length_mean", "reward_mean", "entropy_all"), 5
"""Columns that rules compare with the run's first steps, and how many of these."""


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
    places: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """The step that served a prompt, by source, epoch and position."""
    repeated: list[int] = field(default_factory=list)
    """For each row, its prompts that an earlier step had served."""
    trained: set[str] = field(default_factory=set)
    """The keys of the prompts that were trained on."""
    scored: list[tuple[int, float]] = field(default_factory=list)
    """The steps with a mean reward, and that reward."""
    first: dict[str, list[float]] = field(default_factory=dict)
    """The first numbers of the columns in FIRST."""
    sources: dict[str, int] = field(default_factory=dict)
    """The newest step with a group of each source."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the record of the next step."""
        prompts = [((source, epoch, position), key) for epoch, position, key, source in self.facts(row, "prompts")]
        self.repeated.append(sum(place in self.places for place, _ in prompts))
        self.places |= {place: row["step"] for place, _ in prompts}
        self.trained |= {key for _, key in prompts}
        self.scored += [(row["step"], row["reward_mean"])] if row.get("reward_mean") is not None else []
        for column in FIRST:
            numbers = self.first.setdefault(column, [])
            numbers += [row[column]] if row.get(column) is not None and len(numbers) < FIRST_STEPS else []
        self.sources |= {name.removeprefix("groups/"): row["step"] for name in row if name.startswith("groups/")}
        self.rows.append(row)

    @staticmethod
    def facts(row: Mapping[str, Any], name: str) -> list[Any]:
        """Return the fact of a row, or nothing."""
        return list((row.get("facts") or {}).get(name, ()))

    def numbers(self, column: str, steps: int = WINDOW) -> list[float]:
        """Return the column's numbers in the newest steps that have one."""
        return [value for row in self.rows[-steps:] if (value := row.get(column)) is not None]

    def sums(self, name: str, steps: int = WINDOW) -> list[float]:
        """Return the sums of a fact over the newest steps; zeros where no step has it."""
        rows = [self.facts(row, name) for row in self.rows[-steps:]]
        return [sum(column) for column in zip_longest(*rows, fillvalue=0.0)] or [0.0] * 8

    def examples(self, name: str, steps: int) -> Iterator[str]:
        """Yield the newest steps' examples of a fact, such as ``step 3: r-0-17``."""
        for row in self.rows[-steps:]:
            groups = (row.get("facts") or {}).get("examples", {}).get(name, ())
            yield from (f"step {row['step']}: {group}" for group in groups)

    def settled(self, name: str, default: Any = None) -> Any:
        """Return a setting of the trainer."""
        return self.settings.get(name, default)

    @property
    def is_on_policy(self) -> bool:
        """True if each token is trained on once, by the policy that sampled it."""
        updates = self.settled("updates_per_batch", 1) * self.settled("epochs_per_batch", 1)
        return updates == 1 and not any(self.numbers("staleness_max", 5))

    @property
    def rewards(self) -> Counter[float]:
        """The number of completions by reward in the newest three steps."""
        return sum((Counter(dict(map(tuple, row.get("reward_counts", ())))) for row in self.rows[-3:]), Counter())
