"""The names of the algorithm's methods, and the values that their papers give them.

Settings read this module, so it must load without torch. A name of the form ``module:function`` stands for a function
of the user's; docs/guides/objectives.md has the contracts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "batch_std",
    "reinforce",
    "reinforce_baseline",
    "pass_at_k",
    "maxrl",
    "gdpo",
    "rae",
    "gae",
)
"""The formulas from rewards to advantages: the functions of these names in trainer/algorithm/advantages.py."""

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "batch_std", "reinforce_baseline", "pass_at_k", "maxrl", "gdpo")
"""Advantages that compare a completion with the rest of its group; in a group of one they are 0."""

LONE_GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "pass_at_k", "maxrl")
"""Group advantages that depend on no other group of the batch, as a deviation or a whitening over it would."""

NORMALISED_ADVANTAGES = ("grpo", "batch_std")
"""Group advantages that divide by a deviation of rewards, and would divide the weight of a penalty by it, too."""


class Aggregation(StrEnum):
    """The mean that turns token losses into one number."""

    TOKEN_MEAN = "token_mean"
    PROMPT_MEAN = "prompt_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT_LENGTH = "constant_length"


class Credit(StrEnum):
    """The part of an episode whose tokens share an advantage."""

    EPISODE = "episode"
    TURN = "turn"


@dataclass(frozen=True)
class LossMethod:
    """A policy loss as its paper has it."""

    options: tuple[str, ...] = ()
    """The keyword arguments of its function that settings of the same names change."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    truncates: bool = False
    """True when it truncates the weight rho of a token itself."""
    bounds_behaviour: bool = False
    """True when its bounds are around the policy that sampled, so that they act with one update a batch, too."""
    importance_cap: float | None = None
    """The largest weight of ``truncated``, if the loss needs another than CAPS in policy_losses.py."""


LOSSES: Mapping[str, LossMethod] = {
    "clipped": LossMethod(("clip_low", "clip_high", "dual_clip")),
    "gspo": LossMethod(("clip_low", "clip_high"), Aggregation.SEQUENCE_MEAN),
    "cispo": LossMethod(("clip_low", "clip_high"), truncates=True),
    "sapo": LossMethod((), Aggregation.SEQUENCE_MEAN),
    # Rare tokens, which may move by a large ratio, must keep their weight (arXiv:2602.04879, section 5.4).
    "dppo_tv": LossMethod(("clip_low", "clip_high"), bounds_behaviour=True, importance_cap=20.0),
    "dppo_kl": LossMethod(("clip_low", "clip_high"), bounds_behaviour=True, importance_cap=20.0),
}
"""The policy losses: the functions of these names in trainer/algorithm/policy_losses.py."""

LOSS_OPTIONS = ("clip_low", "clip_high", "dual_clip")
"""The settings that are options of a loss."""


class ImportanceCorrection(StrEnum):
    """The correction for tokens sampled by another policy, or another engine, than the one in training."""

    NONE = "none"
    TRUNCATED = "truncated"
    ICEPOP = "icepop"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


def is_own_function(name: str) -> bool:
    """Return whether ``name`` has the form ``module:function``."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None
