"""The state of a run besides its weights and optimizer, and the checks before a run continues from one.

A run continues with its own model and data only, and not after success unless RUN_ID asks for it. This module loads
without torch, because collectors, which have no torch, compare the data, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict

from services.clients.teacher import PROBE_TOLERANCE, probe_distance
from services.core.errors import ConfigurationError
from services.core.files import saved_steps
from services.core.logs import get_logger
from services.core.run_ids import job_id
from services.protocol.prompts import ROWS, Cursor, DataStats
from services.run_page.progress import of_sources
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


class Computation(BaseModel):
    """The machine and the packages that computed a step: with others, its last bits may differ."""

    ranks: int
    replicas: int
    """Copies of the sharded state."""
    device: str
    processor: str
    """The instructions that torch uses of a CPU, or the name of the GPU."""
    threads: int
    """Threads of a rank."""
    compute_type: str
    torch: str
    transformers: str


class RunState(BaseModel):
    """The state of a run besides its weights and optimizer."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Completed steps."""
    policy_version: int = 0
    """The version of the policy after these steps."""
    model_type: str
    parameters: int
    cursors: dict[str, Cursor] = {}
    """The prompts used so far, by source; that of a run without SOURCES is ""."""
    prompts_used: int = 0
    """Prompts of these steps, those of groups that were left out included."""
    role_baselines: dict[str, dict[int, float]] = {}
    """The baselines of ADVANTAGE=rae after these steps, by source and seat."""
    replay_snapshot: str | None = None
    rewards: list[float] = []
    """Mean reward of each completed step."""
    rewards_by_source: dict[str, list[float]] = {}
    """The same of each source, for the steps in which it had groups; empty without SOURCES."""
    accuracies_by_source: dict[str, list[float]] = {}
    """The greedy pass@1 of each source before training, and the newest; empty without SOURCES."""
    accuracy_before: float | None = None
    """Greedy pass@1 on the held-out prompts before training: a point estimate, as the other accuracies."""
    accuracy_before_low: float | None = None
    accuracy_before_high: float | None = None
    """The ends of its 95% interval."""
    accuracy_before_prompts: int | None = None
    """The prompts that it is over."""
    eval_reward_before: float | None = None
    """The mean reward of their greedy answers."""
    best_accuracy: float | None = None
    best_step: int | None = None
    """The step of the best accuracy; its checkpoint is kept."""
    last_accuracy: float | None = None
    last_accuracy_low: float | None = None
    last_accuracy_high: float | None = None
    last_accuracy_prompts: int | None = None
    evaluated_step: int | None = None
    evaluation_error: str | None = None
    """Why the newest evaluation has no accuracy."""
    seconds: float = 0.0
    random_state: list[int] = []
    """State of torch's CPU generator, as bytes."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of model and data; rank 0 always has it."""
    job: str | None = None
    """The SkyPilot job that saved the state; see ``job_id``."""


def describe_accuracy(metrics: Mapping[str, float]) -> str:
    """Return the accuracy that TARGET_ACCURACY is compared with, a point estimate, with its interval and prompts."""
    accuracy, low, high = (metrics[name] for name in ("accuracy", "accuracy_low", "accuracy_high"))
    prompts = _judged_prompts(metrics)
    interval_ = f"({low:.3f} to {high:.3f})"
    return f"greedy pass@1 of {accuracy:.3f} {interval_} on {prompts} held-out prompt{'s'[: prompts != 1]}"


def _judged_prompts(metrics: Mapping[str, float]) -> int:
    return int(metrics.get("eval_prompts", 0.0) - metrics.get("eval_left_out", 0.0))


def note_accuracy(settings: TrainerSettings, state: RunState, metrics: Mapping[str, float]) -> None:
    """Note an evaluation's greedy pass@1 in the run's state: the newest, the best, and that before the first step.

    Without metrics the evaluation failed.
    """
    accuracy = metrics.get("accuracy")
    state.last_accuracy, state.evaluated_step = accuracy, state.step
    state.last_accuracy_low, state.last_accuracy_high = metrics.get("accuracy_low"), metrics.get("accuracy_high")
    state.last_accuracy_prompts = _judged_prompts(metrics)
    for source, value in of_sources(metrics, "accuracy").items():
        state.accuracies_by_source[source] = [*state.accuracies_by_source.get(source, [])[:1], value]
    if state.step == 0:
        state.accuracy_before = accuracy
        state.accuracy_before_low, state.accuracy_before_high = state.last_accuracy_low, state.last_accuracy_high
        state.accuracy_before_prompts = state.last_accuracy_prompts
        state.eval_reward_before = metrics.get("eval_reward")
    if accuracy is not None and accuracy > (state.best_accuracy or 0.0):
        state.best_accuracy, state.best_step = accuracy, state.step or None
        log.info("best so far", step=state.step, accuracy=describe_accuracy(metrics))
    if reached_target(settings, state):
        log.info("TARGET_ACCURACY reached", target=settings.target_accuracy, best=state.best_accuracy)


def reached_target(settings: TrainerSettings, state: RunState) -> bool:
    """Return whether an evaluation's greedy pass@1, a point estimate, was at least TARGET_ACCURACY."""
    target = settings.target_accuracy
    return target is not None and (state.best_accuracy or 0.0) >= target


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
