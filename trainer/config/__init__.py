"""The trainer's settings: their sections, how they fit together, and what follows from them."""

from __future__ import annotations

from trainer.config.sections import SELF, CriticModel, Layout, Mode, PublishedType, Rollout, Schedule, Transport
from trainer.config.settings import TrainerSettings

__all__ = [
    "SELF",
    "CriticModel",
    "Layout",
    "Mode",
    "PublishedType",
    "Rollout",
    "Schedule",
    "TrainerSettings",
    "Transport",
]
