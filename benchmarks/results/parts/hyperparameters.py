"""A sweep over learning rate, group size, temperature and clip on the tiny task."""

from __future__ import annotations

from benchmarks.results.runs import Settings
from benchmarks.results.sweeps import Sweep, sweep_part
from benchmarks.results.tasks import TINY

PANELS: dict[str, dict[str, Settings]] = {
    "group size": {
        "4": {"GROUP_SIZE": "4", "BATCH_SIZE": "16"},
        "8": {},
        "16": {"GROUP_SIZE": "16", "BATCH_SIZE": "4"},
    },
    "temperature": {"0.7": {"TEMPERATURE": "0.7"}, "1": {}, "1.3": {"TEMPERATURE": "1.3"}},
    "clip": {clip: {"UPDATES_PER_BATCH": "4", "CLIP_LOW": clip, "CLIP_HIGH": clip} for clip in ("0.1", "0.2", "0.4")},
}

SWEEP = Sweep(
    task=TINY,
    rates=("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3"),
    panels=PANELS,
    choosing=range(100, 103),
    follow_up="2e-3",
    reporting=range(5),
)
PART = sweep_part(
    "hyperparameters", "Hyperparameters of the tiny task", "The tiny task of the parts above, 40 steps.", SWEEP
)
