"""Equal ways on the demo's task, with a pretrained model."""

from __future__ import annotations

from benchmarks.results.tasks import DEMO_TASK
from benchmarks.results.ways import LORA_RATE_FACTOR, ways, ways_part

CHECKPOINT_EVERY, KILLED_AT = 2, 5
LEFT_OUT = ("asynchronous, staleness 2", "asynchronous, staleness 4", "four ranks")
"""Ways of the tiny task that cost much memory or time here and show nothing further."""
TEXT = f"""
SmolLM2-135M, pretrained, with the settings of `examples/demo.env` in float32, 10 steps: one-digit additions, a reward
of 1 for the number alone and of 0 for everything else. The rows are those of the tiny task, and adapters: LoRA has rank
8 and {LORA_RATE_FACTOR:g} times the learning rate, the only rate that was tried. `killed and resumed` has its trainer
killed after step {KILLED_AT}, with a checkpoint every {CHECKPOINT_EVERY} steps.
"""
WAYS = ways(DEMO_TASK, checkpoint_every=CHECKPOINT_EVERY, killed_at=KILLED_AT)
PART = ways_part(
    "equal_ways_demo",
    "Equal ways on the demo's task",
    TEXT,
    "demo",
    DEMO_TASK,
    {name: way for name, way in WAYS.items() if name not in LEFT_OUT},
    seeds=range(3),
)
