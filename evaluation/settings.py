"""The settings of an evaluation: environment variables, over which options of the command line win.

A setting that means the same in training has the same name there, so that a run's ``--env-file`` evaluates a checkpoint
as it was trained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.core.settings import (
    AgentSettings,
    AnswerSettings,
    DeterminismSettings,
    JsonTexts,
    ModelSettings,
    SourcesSettings,
    TemplateSettings,
)


class EvaluationSettings(
    ModelSettings, TemplateSettings, AnswerSettings, AgentSettings, DeterminismSettings, SourcesSettings
):
    """Settings of an evaluation."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the samples; 1 cuts nothing."""
    seed: int = Field(0, ge=0)
    """Seed of the sampling."""
    eval_split: Literal["test", "train", "all"] = "test"
    """`test`, `train` or `all` (both); DATASET_TEST_SPLIT says which split of a Hugging Face dataset is `test`."""
    eval_output: Path = Path("runs/evaluations")
    """Evaluations are in directories below, by model and dataset."""
    eval_prompts: int = Field(0, ge=0)
    """Evaluate only this many prompts, the first ones, of each source where there are several; 0: all, where the
    trainer's EVAL_PROMPTS of 0 turns evaluation off."""
    eval_samples: int = Field(0, ge=0, le=1024)
    """Samples of each prompt, for avg@k, pass@k and maj@k; 0: greedy only."""
    eval_k: str = ""
    """Each k of pass@k and maj@k, with commas; default 2, 4, 8 and so on up to EVAL_SAMPLES, and that."""
    eval_stop: JsonTexts = Field(default_factory=list)
    """Texts that end a completion, as a JSON list such as `["Question:"]`; an agent gives its own."""
    eval_concurrency: int = Field(64, ge=1)
    """Prompts in flight for each server that is started, or at the address of running ones; an agent's episodes are
    bounded by their number."""

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if not re.fullmatch(r"([1-9]\d*(,[1-9]\d*)*)?", self.eval_k):
            raise ValueError(f"EVAL_K is {self.eval_k!r}; give each k from 1 on, with commas, such as 1,4,16")
        if self.agent and self.agent_command:
            raise ValueError("AGENT and AGENT_COMMAND are both set; unset one of them")
        if self.eval_stop and self.has_agent:
            raise ValueError("EVAL_STOP is set, but an agent gives its own stop texts; unset EVAL_STOP")
        if too_large := [k for k in self.ks if k > self.eval_samples]:
            most = too_large[-1]
            raise ValueError(f"k {most} (EVAL_K, --k) needs as many EVAL_SAMPLES (--samples), not {self.eval_samples}")
        return self

    @property
    def has_agent(self) -> bool:
        """True if an agent answers prompts, and not one completion."""
        return bool(self.agent or self.agent_command)

    @property
    def ks(self) -> list[int]:
        """Each k of pass@k and maj@k, in order."""
        if self.eval_k:
            return sorted({int(k) for k in self.eval_k.split(",")})
        # pass@1 and maj@1 are avg@n.
        powers = [2**i for i in range(1, self.eval_samples.bit_length())]
        return sorted({*powers, self.eval_samples} - {0})
