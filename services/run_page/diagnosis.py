"""The findings of a run, step by step, by the rules of rules.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.run_page.history import History
from services.run_page.rules import DOUBT, NOTE, RULES, WRONG

FORGOTTEN = 20
"""Steps after which a doubt that has not come again is a note."""
MOST_SAMPLES = 3
ORDER = (WRONG, DOUBT, NOTE)


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
