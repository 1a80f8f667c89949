"""Settings that change while a run runs: those that may, the requests of ``grpo set``, and the record of the changes.

A request is a file in the run directory, and not a route of the run page: it outlives a crash of the trainer, it can
wait while a step takes minutes, and it needs no open port. Whoever can write it could also change the checkpoints.

The trainer takes requests between two steps. It records each with the first step for which it holds before that step
begins, so that a run that resumes, from whichever checkpoint, repeats the change at the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, JsonValue
from pydantic_settings import PydanticBaseSettingsSource

from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.run_page.directory import CHANGES, read_changes
from trainer.config.settings import TrainerSettings

CHANGEABLE = (
    *("learning_rate", "lr_schedule", "warmup_steps", "critic_learning_rate", "max_grad_norm"),
    *("clip_low", "clip_high", "dual_clip", "importance_cap", "off_policy_max_kl", "kl_coef", "entropy_coef"),
    *("teacher_coef", "replay_groups", "replay_max_kl", "max_steps"),
    *("eval_every", "target_accuracy", "checkpoint_every", "checkpoints_kept", "keep_checkpoints_every"),
)
"""The settings that may change between two steps: each step reads them anew, or ``RankCalls.change_settings`` hands
them to what holds a copy."""
REQUESTS = "requests"
"""The directory of requests within a run directory."""
NOT_SETTINGS = {"jobgroup_token", "shared_dir", "run_id", "log_level", "log_format", "record_groups"}
"""Settings on which no step depends; records leave them out."""


class Request(BaseModel):
    """A request of ``grpo set``: new values by the setting's name, and why the trainer refused them, if it did."""

    values: dict[str, JsonValue]
    refusal: str = ""


class Change(BaseModel):
    """A request that the trainer has taken, or the step at which `grpo fork --env` replaces earlier ones."""

    step: int
    """The first step for which the values hold."""
    request: str
    """The name of the request, which begins with its time."""
    values: dict[str, JsonValue]
    launched: dict[str, JsonValue]
    """The values with which the run had been started. Once it is started with another one, that one holds."""
    resets: list[str] = []
    """The settings that return to the values with which the run was started; `grpo fork --env` has set these."""


class SettingsAsRecorded(TrainerSettings):
    """The trainer's settings as a record has them; variables of this process count for nothing."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the arguments alone."""
        return (init_settings,)


def as_recorded(run_dir: Path, record: Mapping[str, JsonValue]) -> SettingsAsRecorded:
    """Return a run's settings from the values in ``record`` and the defaults.

    Raises:
        ConfigurationError: a value is not allowed, or does not fit the others.
    """
    recorded: dict[str, Any] = dict(record) | {"shared_dir": run_dir.parent.parent, "run_id": run_dir.name}
    if recorded.get("sources"):
        recorded["sources"] = run_dir / "sources.yaml"
    return SettingsAsRecorded.load(**recorded)


def to_record(settings: TrainerSettings) -> dict[str, JsonValue]:
    """Return the settings that were not left at their defaults, for ``as_recorded``."""
    return settings.model_dump(mode="json", exclude_unset=True, exclude=NOT_SETTINGS)


def obstacle(name: str, before: TrainerSettings, after: TrainerSettings) -> str | None:
    """Return why a setting cannot change between two steps from its value in ``before``; None if it can."""
    if name not in CHANGEABLE:
        return "models, optimizers, collectors or services read it when they start"
    if name == "kl_coef" and not before.lora_rank and (before.kl_coef > 0) != (after.kl_coef > 0):
        return f"it is {before.kl_coef:g}, and a run has a reference model only if it started with KL_COEF above 0"
    if before.services != after.services:
        return f"{', '.join({*before.services} ^ {*after.services})} would have to start or to end"
    return None


def changed(run_dir: Path, record: Mapping[str, JsonValue], values: Mapping[str, JsonValue]) -> TrainerSettings:
    """Return a run's settings with new values.

    Args:
        run_dir: the run.
        record: its settings, as ``to_record`` returns them.
        values: the new values by name.

    Raises:
        ConfigurationError: a value is not allowed, or its setting cannot change while a run runs.
    """
    before = as_recorded(run_dir, record)
    # Names first, because the values of other settings may be refused for less helpful reasons.
    for name in values:
        _refuse(name, obstacle(name, before, before))
    after = as_recorded(run_dir, {**record, **values})
    for name in values:
        _refuse(name, obstacle(name, before, after))
    return after


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigurationError(
            f"{name.upper()} cannot change while a run runs: {reason}. End the run and start it again with --env "
            f"{name.upper()}=VALUE, or fork it; `grpo set` changes {', '.join(CHANGEABLE).upper()}"
        )


def follow(settings: TrainerSettings, other: TrainerSettings) -> None:
    """Give ``settings`` the values of CHANGEABLE in ``other``, in place, so that all that holds the object has them.

    The class is frozen against any other change.
    """
    settings.__dict__.update({name: getattr(other, name) for name in CHANGEABLE})
    settings.model_fields_set.difference_update(CHANGEABLE)
    settings.model_fields_set.update(other.model_fields_set.intersection(CHANGEABLE))


def write_request(run_dir: Path, values: Mapping[str, JsonValue]) -> Path:
    """Write a request into a run directory, and return its file."""
    path = run_dir / REQUESTS / f"{time.time_ns()}-{os.getpid()}.json"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, Request(values=dict(values)).model_dump_json())
    return path


def changes_of(run_dir: Path) -> list[Change]:
    """Return the recorded changes of a run, in the order of their steps."""
    return [Change.model_validate(record) for record in read_changes(run_dir)]


class Changes:
    """The changes of a run's settings on rank 0: those on record, and new requests."""

    def __init__(self, settings: TrainerSettings, saved: Sequence[Change]) -> None:
        """Read the record of the run.

        Args:
            settings: those with which the run was started.
            saved: the changes in the checkpoint from which it resumes.
        """
        self._settings = settings
        self._launched = settings.model_dump(mode="json", include={*CHANGEABLE})
        known = {change.request: change for change in (*saved, *changes_of(settings.run_dir))}
        self._ahead = sorted(known.values(), key=lambda change: (change.step, change.request))
        self.taken: list[Change] = []
        """The changes that ``next`` has returned."""

    def next(self, step: int) -> Change | None:
        """Return the next change that holds from ``step`` on or from an earlier step, each once; None without one.

        A new request waits until all recorded changes have been repeated. Then it is recorded for ``step``. One that
        cannot be taken gets the reason.

        Raises:
            OSError: the run directory cannot be written.
        """
        if not self._ahead:
            self._take_request(step)
        if not self._ahead or self._ahead[0].step > step:
            return None
        self.taken.append(self._ahead.pop(0))
        return self.taken[-1]

    def held(self, change: Change) -> dict[str, JsonValue]:
        """Return the values of a change, without those that a later start of the run has replaced."""
        launched = self._launched
        kept = {name: x for name, x in change.values.items() if change.launched[name] == launched[name]}
        return kept | {name: launched[name] for name in change.resets}

    def _take_request(self, step: int) -> None:
        """Record the oldest request that can be taken, if there is any; answer those that cannot."""
        for path in sorted((self._settings.run_dir / REQUESTS).glob("*.json")):
            try:
                request = Request.model_validate_json(path.read_bytes())
                if request.refusal:
                    continue
                if path.stem not in {change.request for change in self.taken}:
                    self._ahead = [self._accept(path.stem, request.values, step)]
                    records = [change.model_dump(exclude_defaults=True) for change in (*self.taken, *self._ahead)]
                    atomic_write(self._settings.run_dir / CHANGES, b"".join(orjson.dumps(x) + b"\n" for x in records))
            except (ConfigurationError, ValueError) as error:
                atomic_write(path, Request(values={}, refusal=str(error)).model_dump_json())
                continue
            path.unlink()
            if self._ahead:
                return

    def _accept(self, request: str, values: Mapping[str, JsonValue], step: int) -> Change:
        after = changed(self._settings.run_dir, to_record(self._settings), values)
        if 0 < after.max_steps < step:
            raise ConfigurationError(
                f"MAX_STEPS is {after.max_steps}, but step {step - 1} is complete; give {step} or more, or stop the run"
            )
        new = after.model_dump(mode="json", include={*values})
        return Change(step=step, request=request, values=new, launched={name: self._launched[name] for name in values})
