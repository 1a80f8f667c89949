"""The rollout-server's settings: those of the engine, and those of its launcher, SGLang and the router."""

from __future__ import annotations

import shlex
from enum import StrEnum

from pydantic import Field, field_validator

from services.core.machine import ComputeType
from services.core.settings import ContextSettings, EnginesSection, MemorySettings, ModelSettings

EMBEDDED_MAX_TOTAL_TOKENS = 65_536
"""ENGINE_MAX_TOTAL_TOKENS of the embedded engine where it is unset, unless the context is longer."""


class EngineSettings(ModelSettings, ContextSettings, MemorySettings):
    """The environment variables of a rollout node's engine."""

    engine_dtype: ComputeType = ComputeType.AUTO
    """The type of numbers that the engine computes in: `float32`, `bfloat16` or `auto`. The embedded engine's `auto` is
    the trainer's (COMPUTE_TYPE). SGLang's `auto` is bfloat16."""
    engine_max_running_requests: int | None = Field(None, ge=1)
    """Completions computed at once by one engine; further ones wait. Default: SGLang's own choice, and 64 for the
    embedded engine."""
    engine_max_total_tokens: int | None = Field(None, ge=64)
    """Tokens for which one engine keeps keys and values. Default: SGLang's own choice, and 65536 or the context length,
    whichever is more, for the embedded engine, whose prefix cache has up to half as many more. [advanced]"""


class EngineKind(StrEnum):
    """The engine that generates on a rollout node."""

    AUTO = "auto"
    SGLANG = "sglang"
    EMBEDDED = "embedded"


class RolloutSettings(EngineSettings, EnginesSection):
    """The environment variables of a rollout node."""

    rollout_engine: EngineKind = EngineKind.AUTO
    """`sglang`, `embedded` (for machines without a GPU), or `auto`: SGLang where there is a GPU."""
    rollout_max_restarts: int = Field(3, ge=0)
    """Restarts within ten minutes of an engine or router that ended; after them the launcher exits with 33. One
    that never answered gets the same number of restarts in total; then the launcher exits with 78. [advanced]"""
    sglang_python: str | None = None
    """The interpreter of the environment with SGLang; default the launcher's own. [advanced]"""
    sglang_tp_size: int | None = Field(None, ge=1)
    """SGLang's tensor parallel size: GPUs of an engine. A node runs as many engines as its GPUs allow. Default: the
    smallest size that SGLang can split the model into and at which the weights take at most half of a GPU's memory."""
    sglang_extra_flags: str = ""
    """More flags for `sglang.launch_server`, as on a command line, such as `--mem-fraction-static 0.8`. They win over
    the launcher's own; `--no-enable-fp32-lm-head` leaves out the head in float32, which engines on GPUs have."""
    batch_size: int | None = Field(None, ge=1, le=4096)
    """The trainer's BATCH_SIZE, if it is set: SGLang's CUDA graphs then cover the sequences of a step."""
    group_size: int = Field(8, ge=1, le=1024)
    """The trainer's GROUP_SIZE."""
    router_extra_flags: str = ""
    """More flags for `sglang_router.launch_router`, as on a command line, such as `--policy round_robin`. They win over
    the launcher's own, which docs/architecture.md lists. [advanced]"""

    @property
    def stale_seconds(self) -> float:
        """Longest time that a registered worker may serve an older version while the trainer does not answer.

        It leaves the routing and loads the newest then. A trainer that answers may be publishing it, and has half an
        hour. A sleeping engine (ENGINE_SLEEPS) wakes after as long without the trainer.
        """
        return self.service_deadline_seconds / 5

    @property
    def lost_seconds(self) -> float:
        """Longest time in which a node cannot register its worker, because the router or the volume is gone.

        Up to half an hour in which it reads a version does not count.
        """
        return 2 * self.service_deadline_seconds

    @field_validator("sglang_extra_flags", "router_extra_flags")
    @classmethod
    def _flags_can_be_split(cls, text: str) -> str:
        shlex.split(text)  # raises ValueError for an open quotation
        return text
