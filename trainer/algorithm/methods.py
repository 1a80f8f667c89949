"""The names of the methods in trainer/algorithm/grpo.py, in a module that loads without torch, as settings must."""

from __future__ import annotations

from enum import StrEnum


class AdvantageMethod(StrEnum):
    """How rewards of a group become advantages."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT_LENGTH = "constant_length"


class KLEstimator(StrEnum):
    """Which estimator of KL(theta || reference) is used, from samples of theta."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
