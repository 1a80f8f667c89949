"""The embedded engine's settings. The rollout-server's extend them, because it starts the engine and SGLang alike."""

from __future__ import annotations

from pydantic import Field

from services.core.machine import ComputeType
from services.core.settings import ModelSettings


class EngineSettings(ModelSettings):
    """The environment variables of a rollout node's engine."""

    engine_dtype: ComputeType = ComputeType.AUTO
    """The type of numbers that the engine computes in: `float32`, `bfloat16` or `auto`. The embedded engine's `auto` is
    the trainer's (COMPUTE_TYPE): bfloat16 on a GPU and on processors with bfloat16 instructions (AVX512-BF16 or AMX),
    float32 on other processors, which emulate bfloat16 many times more slowly. SGLang's `auto` is SGLang's own: the
    type that the model's config.json names, but float16 instead of float32."""
    engine_context_length: int | None = Field(None, ge=16)
    """Longest prompt and completion together, in tokens; default the model's."""
    engine_max_running_requests: int | None = Field(None, ge=1)
    """Completions computed at once by one engine; further ones wait. Default: SGLang's own choice, and 64 for the
    embedded engine."""
    engine_max_total_tokens: int | None = Field(None, ge=64)
    """Tokens for which one engine keeps keys and values. Default: SGLang's own choice, and 65536 or the context length,
    whichever is more, for the embedded engine, whose prefix cache has up to half as many more."""
    keep_memory: bool = False
    """The embedded engine keeps the memory of replaced weights for the next weights instead of returning it to the
    system, so that they are ready in half the time. The trainer has a setting of that name, too."""
