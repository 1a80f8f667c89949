"""A test of equivalence: two one-sided t-tests on the difference of two variants, taken seed by seed.

Two variants are equal within a margin if the 90% confidence interval of their mean difference lies between minus and
plus the margin (TOST at the 5% level; Schuirmann 1987, doi:10.1007/BF01068419). The margin is chosen before the data
are seen. An interval that contains 0 alone proves nothing: few seeds make it wide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.results.runs import Result

LEVEL = 0.05
"""The chance of calling two variants equal whose difference is the margin."""
AREA_MARGIN = 0.02
"""Margin of the mean reward over all steps."""
ACCURACY_MARGIN = 0.1
"""Margin of the accuracy on held-out prompts."""


class Verdict(StrEnum):
    """The outcome of a test."""

    EQUAL = "equal"
    DIFFERENT = "different"
    OPEN = "open"


@dataclass(frozen=True)
class Comparison:
    """The mean difference of two variants over the seeds that both have."""

    seeds: int
    mean: float
    low: float
    """Lower end of the 90% confidence interval."""
    high: float
    margin: float

    @property
    def verdict(self) -> Verdict:
        """``EQUAL`` if the interval is within the margin, ``DIFFERENT`` if it is all beyond it, else ``OPEN``."""
        if -self.margin < self.low and self.high < self.margin:
            return Verdict.EQUAL
        return Verdict.DIFFERENT if self.low > self.margin or self.high < -self.margin else Verdict.OPEN

    @property
    def is_signed(self) -> bool:
        """True if the interval excludes 0, so that the sign of the difference is known."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def compare(
    own: Sequence[Result], base: Sequence[Result], number: Callable[[Result], float | None], margin: float
) -> Comparison | None:
    """Return how a number of ``own`` differs from that of ``base``; None with fewer than two common seeds."""
    others = {result.seed: number(result) for result in base}
    pairs = [(number(result), others.get(result.seed)) for result in own]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    count = len(differences)
    if count < 2:
        return None
    mean = statistics.fmean(differences)
    half = t_quantile(1 - LEVEL, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Comparison(count, mean, mean - half, mean + half, margin)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about four digits.

    With t = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1) on -pi/2 < a < pi/2, a finite
    interval over which it is summed.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (degrees - 1))])
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, below / below[-1], angles)))
