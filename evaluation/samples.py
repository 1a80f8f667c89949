"""The samples of an evaluation on disk: written as they come, so that a killed evaluation goes on from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from services.core.errors import ConfigurationError
from services.protocol import FinishReason, RewardResult
from services.protocol.pass_at_k import OVER_LIMIT, is_correct

SAMPLES = "samples.jsonl"
IDENTITY = "evaluation.json"


class Kind(StrEnum):
    """How the tokens of a completion were chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


Key = tuple[str, Kind, int]


class Sample(BaseModel):
    """One completion, or one episode of an agent, of a prompt; ``result`` is None as long as it is not scored."""

    model_config = ConfigDict(frozen=True)

    prompt_id: str
    kind: Kind
    index: int
    category: str | None = None
    prompt: str
    ground_truth: str
    completion: str
    """The text; of an agent, the last that the model said."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Of all turns."""
    turns: int = 1
    tool_calls: int = 0
    messages: list[dict[str, Any]] | None = None
    """An agent's whole conversation."""
    policy_version: int | None = None
    server: str
    seconds: float
    result: RewardResult | None = None

    @property
    def key(self) -> Key:
        """What there is one sample of."""
        return (self.prompt_id, self.kind, self.index)

    @property
    def is_correct(self) -> bool | None:
        """Return whether the answer is right; None while it is not judged."""
        return None if self.result is None else is_correct(self.result)

    @property
    def is_over_limit(self) -> bool:
        """Return whether it is wrong because it exceeds the verifier's time or memory limit."""
        return self.result is not None and self.result.status in OVER_LIMIT


class SampleStore:
    """Samples by key, and the file that they are in. A context manager; one process at a time."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """Makes a store that is not open.

        Args:
            directory: holds the file.
            identity: what the samples depend on; those of another evaluation are refused.
        """
        self.directory = directory
        self.path = directory / SAMPLES
        self._identity = dict(identity)
        self.samples: dict[Key, Sample] = {}
        self.resumed = 0
        """How many were there at the start."""

    def __enter__(self) -> Self:
        """Opens the file and reads what it has.

        Raises:
            ConfigurationError: it belongs to another evaluation, another process has it, or it is no file of samples.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigurationError(f"--output {self.directory}: {error}; give a directory to write to") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigurationError(
                f"another evaluation writes to {self.directory}; wait for it, end it, or give another --output"
            ) from error
        try:
            self._read()
            self._check_identity()
        except BaseException:
            self._file.close()
            raise
        self.resumed = len(self.samples)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            os.fsync(self._file.fileno())

    def add(self, samples: Sequence[Sample]) -> None:
        """Keeps samples; one of a known key takes the place of the former. They survive this process at once."""
        self._file.write(b"".join(sample.model_dump_json().encode() + b"\n" for sample in samples))
        self._file.flush()
        self.samples.update((sample.key, sample) for sample in samples)

    def _read(self) -> None:
        self._file.seek(0)
        position = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # cut off by a kill
            try:
                sample = Sample.model_validate_json(line)
            except ValidationError as error:
                raise ConfigurationError(
                    f"{self.path}, line {number}, is not a sample ({error.errors()[0]['msg']}); give another --output"
                ) from error
            self.samples[sample.key] = sample
            position += len(line)
        self._file.truncate(position)
        self._file.seek(0, os.SEEK_END)

    def _check_identity(self) -> None:
        path = self.directory / IDENTITY
        # As JSON has it, so that it compares with what was written.
        identity = json.loads(json.dumps(self._identity))
        if self.samples and path.exists():
            before = json.loads(path.read_text())
            differing = sorted(name for name in {*before, *identity} if before.get(name) != identity.get(name))
            if differing:
                name = differing[0]
                raise ConfigurationError(
                    f"{self.directory} holds the samples of another evaluation: {name} was {before.get(name)!r} and is "
                    f"{identity.get(name)!r}; give another --output, or remove that directory"
                )
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(json.dumps(identity, indent=2) + "\n")
        temporary.rename(path)
