"""The check before a run continues: not with another model or data, and not after success unless RUN_ID asks for it.

This module loads without torch, because collectors, which have no torch, compare the data, too.
"""

from __future__ import annotations

from pathlib import Path

import orjson
from pydantic import BaseModel

from services.clients.teacher import PROBE_TOLERANCE, probe_distance
from services.core.errors import ConfigurationError
from services.core.files import saved_steps
from services.core.logs import get_logger
from services.core.run_ids import job_id
from services.protocol.prompts import ROWS, DataStats
from trainer.config import TrainerSettings

log = get_logger(__name__)


class TeacherPrint(BaseModel):
    """A teacher: its name or URL, and the digest of its weights, or what it says of a probe."""

    name: str
    weights: str = ""
    probe: list[float] = []
    """Log-probabilities of the tokens of a text, of a teacher behind a URL."""

    def is_as(self, other: TeacherPrint) -> bool:
        """Return whether another teacher is the same one, up to the rounding of an engine."""
        if self.weights != other.weights or len(self.probe) != len(other.probe):
            return False
        return probe_distance(self.probe, other.probe) <= PROBE_TOLERANCE

    @property
    def shown(self) -> str:
        """The teacher as messages name it."""
        return f"{self.name!r} (digest {self.weights})" if self.weights else f"{self.name!r}"


class Fingerprint(BaseModel):
    """The model and data that a run started with. Digests are compared; names appear in messages."""

    model: str
    """MODEL_NAME."""
    weights: str
    tokenizer: str
    dataset: str
    """The data-server's name of its source."""
    data: dict[str, str]
    """The data-server's digests of its prompts, by part; empty where it gives none."""
    teachers: dict[str, TeacherPrint] = {}
    """The teacher of each source that has one, by the source's name."""


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return a line for each difference of weights, tokenizer and data, with the old and the new value."""
    of_model = [
        f"the {part} of MODEL_NAME: {before.model!r} (digest {old}) then, {now.model!r} (digest {new}) now"
        for part, old, new in (
            ("weights", before.weights, now.weights),
            ("tokenizer", before.tokenizer, now.tokenizer),
        )
        if old != new
    ]
    return of_model + _teacher_differences(before, now) + data_differences(before, now.dataset, now.data)


def _teacher_differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    lines = []
    for source in sorted({*before.teachers, *now.teachers}):
        old, new = before.teachers.get(source), now.teachers.get(source)
        if old is None or new is None or not old.is_as(new):
            of_source = f" of source {source!r}" if source else ""
            shown = " then, ".join("none" if teacher is None else teacher.shown for teacher in (old, new))
            lines.append(f"the teacher{of_source}: {shown} now")
    return lines


def data_differences(before: Fingerprint, dataset: str, data: dict[str, str]) -> list[str]:
    """Return a line for the parts of the data that differ; none when the data-server gave no digests then or now.

    The digest of whole rows is compared only if there is one of both.
    """
    if not before.data or not data:
        return []
    parts = [
        f"{part} {before.data.get(part, 'unknown')} then, {data.get(part, 'unknown')} now"
        for part in {**before.data, **data}
        if before.data.get(part) != data.get(part)
        and not (part.endswith(ROWS) and (part not in before.data or part not in data))
    ]
    return [f"the data: {before.dataset!r} then, {dataset!r} now; {'; '.join(parts)}"] if parts else []


def has_succeeded(settings: TrainerSettings) -> bool:
    """Return True when this very job has succeeded before, so that nothing is left to do.

    Raises:
        ConfigurationError: another job has succeeded with a run of this name, and RUN_ID is not set.
    """
    if "run_id" in settings.model_fields_set:
        return False
    summary = _read(settings.run_dir / "summary.json")
    if summary.get("status") != "succeeded":
        return False
    if job_id() is not None and summary.get("job") == job_id():
        log.info("this job has succeeded before: nothing is left to do", run=str(settings.run_dir))
        return True
    raise ConfigurationError(
        f"run {settings.run_id} in {settings.run_dir} has succeeded after {summary.get('steps')} steps, as job "
        f"{summary.get('job') or 'unknown'}; job {job_id() or 'unknown'} only has the same default name and changes "
        f"nothing. Give RUN_ID={settings.run_id} to continue that run, or another RUN_ID for a new one"
    )


def check_same(settings: TrainerSettings, checkpoint: Path, before: Fingerprint, now: Fingerprint) -> None:
    """Check that a checkpoint has the model and the data that the run has now.

    Raises:
        ConfigurationError: weights, tokenizer or data differ.
    """
    if changes := differences(before, now):
        raise _refusal(settings, checkpoint, changes)


def check_data(settings: TrainerSettings, data: DataStats) -> None:
    """Check that the run's newest checkpoint, if any, has the data that the data-server has now.

    Raises:
        ConfigurationError: the data differ.
    """
    steps = saved_steps(settings.checkpoint_dir)
    newest = settings.checkpoint_dir / f"step-{max(steps, default=0):06d}"
    before = _read(newest / "state.json").get("fingerprint") if steps else None
    if before is None:
        return
    if changes := data_differences(Fingerprint.model_validate(before), data.source, data.fingerprint):
        raise _refusal(settings, newest, changes)


def _refusal(settings: TrainerSettings, checkpoint: Path, changes: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"RUN_ID {settings.run_id} cannot continue from {checkpoint}, which is of something else: "
        f"{'. '.join(changes)}. Give the former MODEL_NAME, teacher, DATASET or SOURCES and their settings to "
        "continue, or another RUN_ID to start anew; with "
        f"MODEL_NAME={settings.run_dir / 'model' if settings.lora_rank else settings.policy_dir / 'v...'} the new run "
        "starts from what this one has trained"
    )


def _read(path: Path) -> dict[str, object]:
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
