"""Methods of policy optimisation on the tiny task."""

from __future__ import annotations

from benchmarks.results.methods import methods_part
from benchmarks.results.tasks import TINY

TEXT = """
The tiny task of the parts above. Rewards in eighths leave hardly a group without variance, so that dynamic sampling has
next to nothing to replace. The task rewards eight tokens, which the overlong penalty forbids: here it teaches the
opposite. 40 steps at this learning rate are not enough to learn the task, so the table says how fast a method learns.
GSPO's clip is made for the mean ratio of long completions.
"""
PART = methods_part("methods", "Methods on the tiny task", TEXT, "tiny", TINY, critic_rate="1e-3", seeds=range(5))
