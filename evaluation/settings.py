"""The evaluation's settings: environment variables, which options of the command line win over.

They share their names with those of a training run where they mean the same, so that a run's ``--env-file`` evaluates a
checkpoint as it was trained.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, field_validator

from services.core.settings import Settings

MATH_AGENT = "evaluation.math_agent:solve"


class SchedulerName(StrEnum):
    """Where the servers come from."""

    LOCAL = "local"
    ENDPOINTS = "endpoints"
    SKYPILOT = "skypilot"


class WorkflowName(StrEnum):
    """How an answer comes about."""

    SINGLE_TURN = "single-turn"
    AGENT = "agent"


class EvaluationSettings(Settings):
    """What an evaluation reads from its environment."""

    model_name: str = Field(
        default="Qwen/Qwen2.5-0.5B-Instruct", min_length=1, description="The model: a hub name or a directory."
    )
    max_new_tokens: int = Field(default=512, ge=1, description="Longest completion, in tokens; an agent's, a turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, description="Temperature of the samples; greedy is beside it.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of the samples; 1 cuts nothing.")
    seed: int = Field(default=0, ge=0, description="Seed of the sampling and of the bootstrap.")
    engine_deterministic: bool = Field(
        default=False,
        description="As rollout-server's: completions are then asked for one by one, each with a seed of its own.",
    )
    eval_split: str = Field(
        default="test",
        min_length=1,
        description="`test`, `train`, `all` (both), or any other split of a Hugging Face dataset.",
    )
    eval_workflow: WorkflowName = Field(
        default=WorkflowName.SINGLE_TURN, description="`single-turn`, or `agent`: a callable that talks to the model."
    )
    eval_agent: str = Field(
        default=MATH_AGENT, description="The agent, as `module:function`; the default has the tools add and multiply."
    )
    eval_output: Path = Field(
        default=Path("runs/evaluations"), description="Evaluations are in directories below, by model and dataset."
    )
    eval_prompts: int = Field(default=0, ge=0, description="Evaluate the first so many prompts; 0: all.")
    eval_samples: int = Field(
        default=0, ge=0, le=1024, description="Samples of each prompt, for avg@k, pass@k and maj@k; 0: greedy only."
    )
    eval_k: str = Field(
        default="",
        pattern=r"^(\d+(,\d+)*)?$",
        description="Each k of pass@k and maj@k, with commas; default 2, 4, 8 and so on up to EVAL_SAMPLES, and that.",
    )
    eval_concurrency: int = Field(
        default=64, ge=1, description="Prompts, or an agent's episodes, in flight at one server (or router)."
    )
    eval_prompt_seconds: float = Field(default=600.0, gt=0, description="Longest time that one prompt may take.")
    eval_start_seconds: float = Field(
        default=60.0, gt=0, description="How long to wait for the first server that runs elsewhere."
    )
    eval_lost_seconds: float = Field(
        default=600.0, gt=0, description="How long no server at all may answer before the evaluation gives up."
    )
    eval_resamples: int = Field(default=2000, ge=100, le=100_000, description="Resamples of the bootstrap.")

    @field_validator("eval_k")
    @classmethod
    def _k_is_positive(cls, text: str) -> str:
        if any(int(k) == 0 for k in text.split(",") if k):
            raise ValueError("k is 1 or more")
        return text

    @property
    def ks(self) -> list[int]:
        """Each k, in order."""
        if self.eval_k:
            return sorted({int(k) for k in self.eval_k.split(",")})
        # pass@1 and maj@1 are avg@n.
        powers = [2**i for i in range(1, self.eval_samples.bit_length())]
        return sorted({*powers, self.eval_samples} - {0})
