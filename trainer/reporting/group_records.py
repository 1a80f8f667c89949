"""The record of the groups that each step trained on: one file a step in the run directory, written and read here.

A file has a head, a StepHead as JSON, and then the groups as services/protocol/groups.py packs them, each with a
checksum. A replayed group that the file of an earlier step has is a reference to that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, JsonValue, ValidationError

from services.core.errors import ConfigurationError
from services.core.files import atomic_write, saved_steps
from services.core.logs import get_logger
from services.protocol import groups as wire
from services.protocol.groups import Group, GroupFormatError
from trainer.checkpoints.state import Computation
from trainer.config import TrainerSettings

if TYPE_CHECKING:  # for its name only: readers of records have no torch
    from trainer.algorithm.packing import TrainingGroup

log = get_logger(__name__)

DIRECTORY = "groups"
"""The directory of a run's records within its run directory."""
NOT_SETTINGS = {"jobgroup_token", "shared_dir", "run_id", "log_level", "record_groups"}
"""Settings on which no step depends; records leave them out."""


class Entry(BaseModel):
    """A group in a step's order."""

    group_id: str
    weight: float
    """The group's importance weight in the loss."""
    is_replayed: bool
    step: int | None = None
    """The earlier step whose file has the group; None where the step's own file has it."""


class StepHead(BaseModel):
    """The facts on which a step's update depended, besides its groups and the state before it."""

    step: int
    policy_version: int
    """The version of the policy before the update."""
    position: float
    """The position in the schedule of the learning rate, in steps, and the steps of the whole schedule."""
    total_steps: int
    tokenizer: str
    """The digest of the tokenizer whose ids the groups have."""
    computation: Computation
    settings: dict[str, JsonValue]
    """The trainer's settings in that step that were not left at their defaults."""
    groups: list[Entry]
    """The groups in the order in which they were trained on."""
    waves: list[int] = []
    """The numbers of groups of its waves, in the same order; empty where the whole batch was trained on at once."""


@dataclass(frozen=True)
class RecordedGroup:
    """A group that a step trained on, equal to the bit, with its importance weight."""

    group: Group
    weight: float
    is_replayed: bool


class GroupRecords:
    """The groups that the steps of a run trained on, as far as RECORD_GROUPS kept them; needs no torch.

    ``for step in GroupRecords(Path("runs/demo")).steps: ...`` visits the recorded steps, and ``groups(step)`` returns
    the groups of one in the order in which they were trained on.
    """

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / DIRECTORY

    @property
    def steps(self) -> list[int]:
        """The recorded steps, all of whose groups are there, in ascending order; damaged files count as whole."""
        steps = saved_steps(self.directory)
        return [step for step in steps if self._sources(step) <= set(steps)]

    def head(self, step: int) -> StepHead:
        """Return the head of a step's record.

        Raises:
            ConfigurationError: the step has no record, or its file is damaged.
        """
        try:
            with _path(self.directory, step).open("rb") as stream:
                return _head(wire.first_part(stream))
        except (OSError, GroupFormatError) as error:
            raise self._unreadable(step, error) from error

    def groups(self, step: int) -> list[RecordedGroup]:
        """Return the groups that a step trained on, in their order.

        Raises:
            ConfigurationError: the step has no record, or a file with one of its groups is damaged or was pruned.
        """
        entries = self.head(step).groups
        contents = {source: self._contents(source) for source in {step if e.step is None else e.step for e in entries}}
        return [
            RecordedGroup(contents[step if e.step is None else e.step][e.group_id], e.weight, e.is_replayed)
            for e in entries
        ]

    def _contents(self, step: int) -> dict[str, Group]:
        """Return the groups that the file of a step has by their ids."""
        try:
            head, *parts = wire.split(_path(self.directory, step).read_bytes())
            entries = [entry for entry in _head(head).groups if entry.step is None]
            if len(parts) != len(entries):
                raise GroupFormatError(f"it has {len(parts)} of {len(entries)} groups")
            return {group.group_id: group for group in map(wire.unpack, parts)}
        except (OSError, GroupFormatError, ValidationError) as error:
            raise self._unreadable(step, error) from error

    def _sources(self, step: int) -> set[int]:
        try:
            return {entry.step for entry in self.head(step).groups if entry.step is not None}
        except ConfigurationError:
            return set()

    def _unreadable(self, step: int, error: Exception) -> ConfigurationError:
        path, steps = _path(self.directory, step), saved_steps(self.directory)
        if isinstance(error, FileNotFoundError):
            kept = f"there are files of the steps {steps[0]} to {steps[-1]}" if steps else "there are none"
            return ConfigurationError(
                f"step {step} has no record in {self.directory}: {kept}; RECORD_GROUPS says which steps a run keeps"
            )
        return ConfigurationError(
            f"{path}, the record of step {step}, cannot be read: {error}. Put a copy in its place, or remove it; "
            "steps that replayed none of its groups can be read"
        )


class GroupRecorder:
    """The writer of records, as RECORD_GROUPS says; on rank 0 only.

    A run that resumes from a checkpoint writes the records of later steps again, the same to the byte in synchronous
    mode. Therefore the last n steps before the newest checkpoint stay as well as the last n steps, and before them the
    steps from which these may have replayed.
    """

    def __init__(self, settings: TrainerSettings, resumed_step: int, has_room: Callable[[int], bool]) -> None:
        """Remove the records after ``resumed_step``; ``has_room`` returns whether the volume has room for bytes."""
        self._settings, self._has_room = settings, has_room
        self._directory = settings.run_dir / DIRECTORY
        self._kept = "off" if settings.record_groups is None else settings.record_groups
        for partial in self._directory.glob(".step-*"):
            partial.unlink()
        for step in saved_steps(self._directory):
            if step > resumed_step:
                _path(self._directory, step).unlink()
        self._steps = saved_steps(self._directory)
        reach = settings.replay_max_staleness if settings.replay_groups else 0
        self._reach = min(self._kept, reach) if isinstance(self._kept, int) else reach
        """Steps back to the oldest that has a group by reference."""
        self._ids: dict[int, set[str]] = {}
        """The ids of the groups in the files of the last ``_reach`` steps, by step."""
        for step in (step for step in self._steps if step > resumed_step - self._reach):
            try:
                head = GroupRecords(settings.run_dir).head(step)
            except ConfigurationError as error:
                log.warning(
                    "a record of groups is damaged; what it has is written again if replayed", reason=str(error)
                )
            else:
                self._ids[step] = {entry.group_id for entry in head.groups if entry.step is None}
        self._has_failed = False

    def write(
        self,
        step: int,
        trained: Sequence[TrainingGroup],
        groups: Sequence[Group],
        **fields: float | str | list[int] | Computation,
    ) -> int:
        """Write what a step trained on; return how many groups could not be recorded for lack of disk space.

        Args:
            step: number of the step.
            trained: the groups in the order of the update.
            groups: the same groups, and possibly others, as they were made.
            fields: further fields of StepHead.
        """
        if self._kept == "off":
            return 0
        by_id = {group.group_id: group for group in groups}
        earlier = {group_id: s for s, ids in self._ids.items() if s >= step - self._reach for group_id in ids}
        entries = [
            Entry(
                group_id=group.group_id,
                weight=group.weight,
                is_replayed=group.is_replayed,
                step=earlier.get(group.group_id) if group.is_replayed else None,
            )
            for group in trained
        ]
        included = [entry.group_id for entry in entries if entry.step is None]
        settings = self._settings.model_dump(mode="json", exclude_unset=True, exclude=NOT_SETTINGS)
        head = StepHead.model_validate({"step": step, "settings": settings, "groups": entries, **fields})
        packed = [wire.pack(by_id[group_id]) for group_id in included]
        if not self._put(step, wire.joined([wire.pack_sequences(head.model_dump(mode="json"), []), *packed])):
            return len(trained)
        self._steps.append(step)
        self._ids = {s: ids for s, ids in self._ids.items() if s > step - self._reach} | {step: set(included)}
        self.prune()
        return 0

    def prune(self) -> None:
        """Remove the records of steps that RECORD_GROUPS does not keep."""
        if not isinstance(self._kept, int) or not self._steps:
            return
        saved = max(saved_steps(self._settings.checkpoint_dir), default=0)
        width = self._kept + self._reach
        for step in [s for s in self._steps if not any(end - width < s <= end for end in (self._steps[-1], saved))]:
            _path(self._directory, step).unlink(missing_ok=True)
            self._steps.remove(step)

    def _put(self, step: int, data: bytes) -> bool:
        """Write a file and return True; on a full disk return False, and log the first time that it is full."""
        try:
            if not self._has_room(len(data)):
                raise OSError("the rest of the volume is for checkpoints and policy versions")
            self._directory.mkdir(exist_ok=True)
            atomic_write(_path(self._directory, step), data)
        except OSError as error:
            if not self._has_failed:
                log.error(
                    "the groups of the step are not recorded; the run continues, and tries with each step. "
                    "Make room on the volume, or set RECORD_GROUPS to fewer steps or to off",
                    step=step,
                    reason=str(error),
                )
            self._has_failed = True
            return False
        return True


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def _head(part: bytes | memoryview) -> StepHead:
    try:
        return StepHead.model_validate(wire.unpack_sequences(part)[0])
    except ValueError as error:
        raise GroupFormatError(str(error)) from error
