"""The names of the methods in trainer/algorithm/grpo.py. Settings read them, so this module must load without torch."""

from __future__ import annotations

from enum import StrEnum


class AdvantageMethod(StrEnum):
    """The formula from a group's rewards to advantages."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


class Aggregation(StrEnum):
    """The mean that turns token losses into one number."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT_LENGTH = "constant_length"


class KLEstimator(StrEnum):
    """The estimator of KL(theta || reference) from samples of theta."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
