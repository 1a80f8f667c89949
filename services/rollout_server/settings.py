"""The rollout-server's settings: its launcher, the router, SGLang and the embedded engine."""

from __future__ import annotations

import shlex
from enum import StrEnum

from pydantic import Field, field_validator

from services.core.compute import AUTO_RULE, ComputeType
from services.core.settings import Settings


class EngineKind(StrEnum):
    """What generates on a rollout node."""

    AUTO = "auto"
    SGLANG = "sglang"
    EMBEDDED = "embedded"


class RoutingPolicy(StrEnum):
    """How the router picks a worker."""

    CACHE_AWARE = "cache_aware"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    RANDOM = "random"


class RolloutSettings(Settings):
    """What the rollout-server reads from its environment."""

    model_name: str = Field(
        default="Qwen/Qwen2.5-0.5B-Instruct",
        min_length=1,
        description="The model served as policy version 0: a hub name or a directory.",
    )
    rollout_engine: EngineKind = Field(
        default=EngineKind.AUTO,
        description="`sglang`, `embedded` (for machines without a GPU), or `auto`: SGLang where there is a GPU.",
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
        "context length, whichever is more, for the embedded engine.",
    )
    engine_max_queued_requests: int = Field(
        default=4096,
        ge=1,
        description="Requests that wait in one engine; further ones are answered 429 (503 by SGLang).",
    )
    engine_deterministic: bool = Field(
        default=False,
        description="The same request with the same seed gives the same tokens and logprobs whatever else is computed "
        "at the same time; slower.",
    )
    engine_prefill_tokens: int = Field(
        default=2048, ge=1, description="Prompt tokens that the embedded engine computes between two decoding steps."
    )
    engine_threads: int | None = Field(
        default=None, ge=1, description="Processor threads of the embedded engine; default all cores."
    )
    keep_memory: bool = Field(
        default=False,
        description="The embedded engine keeps the memory of weights that were replaced for the next ones, instead of "
        "giving it back to the system: they are ready in half the time. The trainer has a setting of that name, too.",
    )
    engine_start_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="An engine that does not answer that long after its start has failed. At its start the trainer "
        "waits for services and workers for SERVICE_DEADLINE_SECONDS more than this.",
    )
    engine_hang_seconds: float = Field(
        default=60.0, gt=0, description="An engine whose /health does not answer for that long is killed and restarted."
    )
    engine_stale_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A routed worker that serves an older version than the newest published one for that long leaves "
        "the routing and catches up.",
    )
    rollout_lost_seconds: float = Field(
        default=600.0,
        gt=0,
        description="A node whose worker cannot be registered for that long, since the router or the shared volume is "
        "gone, ends with 33.",
    )
    rollout_max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often within ten minutes the launcher restarts an engine or router that ended; then it exits "
        "with 33. One that never answered is restarted as often in all; then it exits with 78.",
    )

    sglang_python: str | None = Field(
        default=None, description="The interpreter of the environment with SGLang; default the launcher's own."
    )
    sglang_tp_size: int | None = Field(
        default=None, ge=1, description="SGLang's tensor parallel size; default the node's number of GPUs."
    )
    sglang_mem_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="Share of GPU memory for weights and caches; default SGLang's own choice."
    )
    sglang_attention_backend: str | None = Field(
        default=None, pattern=r"^[a-z0-9_]+$", description="SGLang's attention backend; default its own choice."
    )
    sglang_tool_call_parser: str | None = Field(
        default=None, pattern=r"^[a-z0-9_-]+$", description="Which form of tool calls SGLang reads in chat completions."
    )
    sglang_extra_flags: str = Field(
        default="", description="More flags for `sglang.launch_server`, as on a command line; they win over ours."
    )

    router_policy: RoutingPolicy = Field(
        default=RoutingPolicy.CACHE_AWARE,
        description="`cache_aware` (prompts with the same beginning go to the same worker), `round_robin`, "
        "`power_of_two` or `random`.",
    )
    router_imbalance: int = Field(
        default=1,
        ge=0,
        description="By how many requests one worker may be busier than another before `cache_aware` prefers the "
        "idler.",
    )
    router_health_interval_seconds: int = Field(
        default=2, ge=1, description="Seconds between the router's checks of a worker; three failures take it out."
    )
    router_request_seconds: int = Field(
        default=1800, ge=1, description="Longest time that the router gives a worker for one request."
    )
    router_circuit_failures: int = Field(
        default=3,
        ge=1,
        description="Failed requests in a row after which the router leaves a worker alone for a while.",
    )
    router_circuit_seconds: int = Field(default=1, ge=1, description="How long that is.")
    router_retries: int = Field(
        default=5,
        ge=1,
        description="How often the router sends a failed request, on another worker where there is one.",
    )

    @property
    def extra_flags(self) -> list[str]:
        """SGLANG_EXTRA_FLAGS as a list of arguments."""
        return shlex.split(self.sglang_extra_flags)

    @field_validator("sglang_extra_flags")
    @classmethod
    def _flags_can_be_split(cls, text: str) -> str:
        shlex.split(text)  # a ValueError of its own says what is wrong: an open quotation
        return text
