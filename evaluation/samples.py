"""The samples of an evaluation on disk, written as they come, so that a killed evaluation continues from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.identity import check_identity, locked_file, whole_lines
from services.core.errors import ConfigurationError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus, is_correct

SAMPLES = "samples.jsonl"
IDENTITY = "evaluation.json"


class Kind(StrEnum):
    """The way in which the tokens of a completion were chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


Key = tuple[str, Kind, int]
"""Prompt id, kind and index: an evaluation has one sample of each."""


class Sample(BaseModel):
    """One completion, or one episode of an agent, for a prompt."""

    model_config = ConfigDict(frozen=True)

    prompt_id: str
    kind: Kind
    index: int
    category: str | None = None
    prompt: str
    ground_truth: str
    row: dict[str, str] = Field(default_factory=dict, exclude_if=lambda row: not row)
    """The columns of the dataset's row, long ones cut."""
    completion: str
    """The text of the completion, or the last text that the agent's model wrote."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all turns."""
    turns: int = 1
    tool_calls: int = 0
    messages: list[dict[str, Any]] | None = None
    """An agent's whole conversation; None for a single completion."""
    policy_version: int | None = None
    seconds: float
    result: RewardResult

    @classmethod
    def of(cls, prompt: Prompt, kind: Kind, index: int, **outcome: Any) -> Self:
        """Make the sample of ``prompt`` with this kind and index; ``outcome`` gives the other fields."""
        return cls(
            prompt_id=prompt.id,
            kind=kind,
            index=index,
            category=prompt.category,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            row=prompt.shown_row,
            **outcome,
        )

    @property
    def key(self) -> Key:
        """The key of the sample within its evaluation."""
        return (self.prompt_id, self.kind, self.index)

    @property
    def is_correct(self) -> bool | None:
        """Return whether the answer is right; None while it is not judged, or where REWARD_FN does not say."""
        return is_correct(self.result)

    @property
    def answer(self) -> str | None:
        """Return the answer that the verifier read from the completion; None if it found none."""
        return self.result.extracted

    @property
    def is_over_limit(self) -> bool:
        """Return whether the answer is wrong because it exceeds a limit of the verifier, or of an agent's episode."""
        return self.result.status is RewardStatus.OVER_LIMIT


class SampleStore:
    """Samples by key, and the file that holds them."""

    def __init__(self, file: BinaryIO) -> None:
        """Read ``file``; a last line that a kill cut off is removed.

        Raises:
            ConfigurationError: the file does not hold samples.
        """
        self.samples: dict[Key, Sample] = {}
        self._file = file
        for number, line in enumerate(whole_lines(file), start=1):
            try:
                sample = Sample.model_validate_json(line)
            except ValidationError as error:
                raise ConfigurationError(
                    f"{file.name}, line {number}, is not a sample ({error.errors()[0]['msg']}); give another --output"
                ) from error
            self.samples[sample.key] = sample

    def add(self, samples: Sequence[Sample]) -> None:
        """Store samples, so that they survive this process; a sample replaces an earlier one with its key."""
        self._file.write(b"".join(sample.model_dump_json().encode() + b"\n" for sample in samples))
        self._file.flush()
        self.samples.update((sample.key, sample) for sample in samples)


@contextmanager
def open_store(directory: Path, identity: Mapping[str, Any]) -> Iterator[SampleStore]:
    """Yield the store of ``directory``, whose samples depend on everything in ``identity``.

    Raises:
        ConfigurationError: the directory cannot be written, belongs to another evaluation, is in use by another
            process, or does not hold samples.
    """
    with locked_file(directory / SAMPLES, "--output") as file:
        store = SampleStore(file)
        check_identity(
            directory / IDENTITY,
            identity,
            is_used=bool(store.samples),
            results="the samples of another evaluation",
            option="--output",
        )
        yield store
        os.fsync(file.fileno())
