"""The files of an evaluation: records, written as they come, and the settings on which they depend.

A killed command continues from its records. One process at a time writes to a directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import atomic_write
from services.protocol.accuracy import is_correct
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus

SAMPLES = "samples.jsonl"
IDENTITY = "evaluation.json"


@contextmanager
def locked_file(path: Path, option: str) -> Iterator[BinaryIO]:
    """Create a file with its directory, and yield it open for reading and appending, locked against other processes.

    Raises:
        ConfigurationError: the directory, which ``option`` names, cannot be written, or another process holds the file.
        DependencyLostError: the disk became full within the context.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise ConfigurationError(f"{option} {path.parent}: {error}; give a directory to write to") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(f"another process writes to {path.parent}; wait, or change {option}") from error
        yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DependencyLostError(f"{option} {path.parent}: {error.strerror}; make room there") from error
    finally:
        # What could not be written has been an error already.
        with suppress(OSError):
            file.close()


def check_identity(path: Path, identity: Mapping[str, Any], *, is_used: bool, option: str) -> None:
    """Write ``identity`` to ``path``, unless that file has other values and ``is_used`` says that there are results.

    Args:
        path: a JSON file in the directory.
        identity: everything that the results in the directory depend on, by name.
        is_used: whether the directory has results.
        option: the option that names the directory.

    Raises:
        ConfigurationError: a value differs; the message has its name and both values.
    """
    content = json.dumps(identity, indent=2) + "\n"
    # Through JSON, so that tuples compare equal to the lists that were written.
    now: dict[str, Any] = json.loads(content)
    before = json.loads(path.read_text(encoding="utf-8")) if is_used and path.exists() else now
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            values = f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
            remedy = f"give another {option}, or remove that directory"
            raise ConfigurationError(f"{path.parent} has results of other settings: {values}; {remedy}")
    atomic_write(path, content)


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
        shared = {name: getattr(prompt, name) for name in ("category", "prompt", "ground_truth")}
        return cls(prompt_id=prompt.id, kind=kind, index=index, row=prompt.shown_row, **shared, **outcome)

    @property
    def key(self) -> Key:
        """The key of the sample within its evaluation."""
        return (self.prompt_id, self.kind, self.index)

    @property
    def is_correct(self) -> bool | None:
        """Return whether the answer is right; None while it is not judged, or where REWARD_FN does not say."""
        return is_correct(self.result)

    @property
    def is_over_limit(self) -> bool:
        """Return whether the answer is wrong because it exceeds a limit of the verifier, or of an agent's episode."""
        return self.result.status is RewardStatus.OVER_LIMIT


class SampleStore:
    """Samples by key, and the file that holds them."""

    def __init__(self, file: BinaryIO) -> None:
        """Read a locked ``file``; remove a last line that a kill cut off, before more are appended.

        Raises:
            ConfigurationError: a line is not a sample.
        """
        self._file = file
        self.samples: dict[Key, Sample] = {}
        file.seek(0)
        position = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            position += len(line)
            try:
                sample = Sample.model_validate_json(line)
            except ValidationError as error:
                where, why = f"{file.name}, line {number}", error.errors()[0]["msg"]
                raise ConfigurationError(f"{where}, is not a sample ({why}); give another --output") from error
            self.samples[sample.key] = sample
        file.truncate(position)
        file.seek(0, os.SEEK_END)

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
        check_identity(directory / IDENTITY, identity, is_used=bool(store.samples), option="--output")
        yield store
        os.fsync(file.fileno())
