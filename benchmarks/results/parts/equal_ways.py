"""Ways to run one task, on the tiny task."""

from __future__ import annotations

from benchmarks.results.tasks import TINY
from benchmarks.results.ways import ways, ways_part

CHECKPOINT_EVERY, KILLED_AT = 8, 20
TEXT = f"""
A model of 0.4M random weights learns to answer sums with even digits and differences with odd ones. A completion has
eight tokens; its reward is the share of them that are digits of the right kind, and it is right if all eight are. All
seeds begin with the same weights, and a step has 64 completions. The base is the synchronous job group with one trainer
node, in float32, which publishes through the volume; a row changes what it names. The first rows run the same
algorithm. `one process` is the same code without services; `killed and resumed` has its trainer killed with SIGKILL
after step {KILLED_AT}, with a checkpoint every {CHECKPOINT_EVERY} steps, and its CPU seconds lack those of the killed
process. The others run another algorithm or precision. `bfloat16` runs in one process: compare its CPU seconds with
those of `one process`. An asynchronous run's reward at a step is of completions that an earlier policy sampled, so a
part of its lower mean reward is this lag; the accuracy is that of the last policy. LoRA is compared on
[the demo's task](#equal-ways-on-the-demos-task), because here it would train adapters on random weights: the embedding,
which is also the output head, is frozen, and with it frozen training whole projections learns as little.
"""
LEFT_OUT = "LoRA"
PART = ways_part(
    "equal_ways",
    "Equal ways",
    TEXT,
    "tiny",
    TINY,
    {
        name: way
        for name, way in ways(TINY, checkpoint_every=CHECKPOINT_EVERY, killed_at=KILLED_AT).items()
        if name != LEFT_OUT
    },
    seeds=range(5),
)
