"""Variables that earlier versions read: a program that finds one ends and says what to do instead."""

from __future__ import annotations

RETIRED: dict[str, str] = {
    "EVAL_LOST_SECONDS": "an evaluation gives up when no server has answered for 600 s",
    "EVAL_PROMPT_SECONDS": "a prompt of an evaluation may take 600 s at one server",
    "EVAL_RESAMPLES": "intervals are of 2000 resamples",
    "EVAL_START_SECONDS": "an evaluation waits 60 s for servers that run already, and an hour in a job group",
    "EVAL_WORKFLOW": "set EVAL_AGENT to an agent such as evaluation.math_agent:solve; unset, one completion answers",
}
"""By name: what holds now, or what to set instead."""
