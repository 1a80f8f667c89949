"""The state of a run besides its weights and optimizer, and what an evaluation changes in it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from services.core.logs import get_logger
from services.protocol.prompts import Cursor
from services.run_page.progress import of_sources
from trainer.checkpoints.admission import Fingerprint
from trainer.config import TrainerSettings

log = get_logger(__name__)


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
