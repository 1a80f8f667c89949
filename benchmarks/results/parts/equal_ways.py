"""Equal ways give equal results, on the tiny task."""

from __future__ import annotations

from benchmarks.results.tasks import TINY
from benchmarks.results.ways import LORA_RATE_FACTOR, ways, ways_part

CHECKPOINT_EVERY, KILLED_AT = 8, 20
TEXT = f"""
A model of 0.4M random weights learns to answer sums with even digits and differences with odd ones, 64 completions a
step. The base is the synchronous job group with one trainer node, in float32, which publishes through the volume; every
other row changes one thing. `one process` is the same code without services. `killed and resumed` has its trainer
killed with SIGKILL after step {KILLED_AT}, with a checkpoint every {CHECKPOINT_EVERY} steps. `replay` trains on two
replayed groups beside eight fresh ones. LoRA has rank 8 and {LORA_RATE_FACTOR:g} times the learning rate; adapters of
random weights have little to adapt. A group that is k versions old trains the policy k steps late. At a learning rate
by which 40 steps are the whole run, this costs mean reward at equal generated tokens; the asynchronous mode pays it to
generate while it trains.
"""
PART = ways_part(
    "equal_ways",
    "Equal ways give equal results",
    TEXT,
    "tiny",
    TINY,
    ways(TINY, checkpoint_every=CHECKPOINT_EVERY, killed_at=KILLED_AT),
    seeds=range(5),
)
