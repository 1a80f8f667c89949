"""Methods of policy optimisation on the demo's task: a pretrained model and a reward of 0 or 1."""

from __future__ import annotations

from benchmarks.results.methods import methods_part
from benchmarks.results.tasks import DEMO_TASK

TEXT = """
SmolLM2-135M, pretrained, with the settings of `demo.env`, 10 steps: one-digit additions, a reward of 1 for the number
alone and of 0 for everything else. Once most groups are all right or all wrong, they have no variance. Dynamic sampling
replaces them, at the cost of their tokens.
"""
PART = methods_part(
    "methods_demo", "Methods on the demo's task", TEXT, "demo", DEMO_TASK, critic_rate="1e-5", seeds=range(3)
)
