"""The same sweep on the demo's task, with fewer learning rates."""

from __future__ import annotations

from benchmarks.results.parts.hyperparameters import PANELS
from benchmarks.results.sweeps import Sweep, sweep_part
from benchmarks.results.tasks import DEMO_TASK

SWEEP = Sweep(
    task=DEMO_TASK,
    rates=("5e-6", "1e-5", "2e-5", "4e-5"),
    panels=PANELS,
    choosing=range(100, 103),
    follow_up="1e-5",
    reporting=range(3),
)
PART = sweep_part(
    "hyperparameters_demo",
    "Hyperparameters of the demo",
    "The demo's task, 10 steps; the held-out prompts are 20, so that differences of single runs below 0.2 say little.",
    SWEEP,
)
