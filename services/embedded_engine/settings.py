"""The embedded engine's settings. The rollout-server's extend them, because it starts the engine and SGLang alike."""

from __future__ import annotations

from pydantic import Field

from services.core.machine import AUTO_RULE, ComputeType
from services.core.settings import Settings


class EngineSettings(Settings):
    """The environment variables of a rollout node's engine."""

    model_name: str = Field(
        default="Qwen/Qwen2.5-0.5B-Instruct",
        min_length=1,
        description="The model served as policy version 0: a hub name or a directory.",
    )
    engine_dtype: ComputeType = Field(
        default=ComputeType.AUTO,
        description="The type of numbers that the engine computes in: `float32`, `bfloat16` or `auto`. The embedded "
        f"engine's `auto` is the trainer's (COMPUTE_TYPE): {AUTO_RULE}. SGLang's `auto` is SGLang's own: the type that "
        "the model's config.json names, but float16 instead of float32.",
    )
    engine_context_length: int | None = Field(
        default=None, ge=16, description="Longest prompt and completion together, in tokens; default the model's."
    )
    engine_max_running_requests: int | None = Field(
        default=None,
        ge=1,
        description="Completions computed at once by one engine; further ones wait. Default: SGLang's own choice, and "
        "64 for the embedded engine.",
    )
    engine_max_total_tokens: int | None = Field(
        default=None,
        ge=64,
        description="Tokens for which one engine keeps keys and values. Default: SGLang's own choice, and 65536 or the "
        "context length, whichever is more, for the embedded engine, whose prefix cache has up to half as many more.",
    )
    keep_memory: bool = Field(
        default=False,
        description="The embedded engine keeps the memory of replaced weights for the next weights instead of "
        "returning it to the system, so that they are ready in half the time. The trainer has a setting of that name, "
        "too.",
    )
