"""The training loop: the seven steps of GRPO with replay, then publishing, evaluation and checkpoints.

Every rank runs it. Rank 0 alone talks to the services, and tells the others what it got or why it cannot go on.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import orjson
import torch

from services.core import memory
from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.protocol import Cursor, SampledGroup
from trainer.algorithm.advantages import training_group
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.checkpoints.checkpoint import CheckpointStore, RunState
from trainer.checkpoints.volume import DiskFullError, writing
from trainer.config import TrainerSettings
from trainer.main_rank import Conductor
from trainer.model.learner import Learner, StopRequestedError, UpdateResult
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.publishing import Publisher
from trainer.publishing.probe import probe_workers
from trainer.publishing.workers import PUBLISH_SECONDS
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.rollouts.evaluate import describe_accuracy
from trainer.rollouts.groups import group_metrics
from trainer.rollouts.replay import updated_priorities
from trainer.rollouts.sources import Batch
from trainer.service_thread import InterruptedCallError, ServiceThread

log = get_logger(__name__)

EXPECTED_ERRORS = (ConfigurationError, DiskFullError, DependencyLostError, NeverReadyError, InterruptedCallError)
"""The errors of services and run directory that rank 0 passes on to the other ranks."""

GRACE_SECONDS = 60.0
"""Added to the deadlines that calls have themselves, so that their own messages win."""


MAX_SKIPPED_STEPS = 3
"""Non-finite updates in a row that are skipped before the run stops: one bad batch is no divergence."""


class TrainingDivergedError(Exception):
    """More updates in a row than MAX_SKIPPED_STEPS were not finite."""


@dataclass
class Main:
    """What only rank 0 has."""

    thread: ServiceThread
    conductor: Conductor
    files: RunFiles
    status: RunStatus
    batch: Batch = field(default_factory=lambda: Batch([]))
    replayed: list[SampledGroup] = field(default_factory=list)


@dataclass
class TrainingLoop:
    """A run, from its first step or from a checkpoint to its end. Every method is a collective of all ranks."""

    settings: TrainerSettings
    ranks: Ranks
    policy: Policy
    learner: Learner
    publisher: Publisher
    checkpoints: CheckpointStore
    state: RunState
    main: Main | None
    """None on every rank but 0."""
    should_stop: Callable[[], bool]
    skipped_in_a_row: int = 0
    started: float = 0.0
    is_recorded: bool = True
    """False once the metrics of a completed step could not be written."""

    def run(self) -> RunState:
        """Trains to the end and returns the state there.

        Raises:
            InterruptedCallError: the run was asked to stop; a checkpoint of the last completed step is in place.
            TrainingDivergedError: updates were not finite; the last batch is in the run directory.
            DependencyLostError: a service was lost; a checkpoint of the last completed step is in place.
            DiskFullError: the run directory's disk is full; the newest whole checkpoint is in place.
        """
        self.started = time.monotonic() - self.state.seconds
        self._phase("publish")
        # First, since an engine that starts may wait for a version.
        self.publisher.write(self.state.policy_version)
        self.wait_for_workers()
        self.publish()
        if self.state.step == 0:
            before = self.evaluate({})
            self.state.accuracy_before = before.get("accuracy")
            self.state.accuracy_before_stderr = before.get("accuracy_stderr")
        try:
            while self.state.step < self.learner.total_steps and not self.reached_target():
                if not self.step():
                    break
        except (InterruptedCallError, StopRequestedError, DependencyLostError) as error:
            self.leave_checkpoint(error)
            if isinstance(error, StopRequestedError):
                raise InterruptedCallError from error
            raise
        if self.state.evaluated_step != self.state.step:
            self.evaluate({})
        self.save_checkpoint(wait=True)
        return self.state

    def leave_checkpoint(self, error: Exception) -> None:
        """Puts a checkpoint of the last completed step in place before the run ends with ``error``.

        Before the first step there is nothing to save. On a full disk, a checkpoint that is being written is the last.
        """
        try:
            is_full = isinstance(error, DiskFullError) or not self.is_recorded
            if is_full or self.checkpoints.saved_step == self.state.step:
                self.checkpoints.finish()
            elif self.state.step:
                self.save_checkpoint(wait=True)
        except DiskFullError as full:
            # Not raised: it would hide why the run ends. Where that is the full disk, it is said once.
            reason = None if isinstance(error, DiskFullError) else str(full)
            log.error("no checkpoint of the last completed step", step=self.state.step, reason=reason)

    def step(self) -> bool:
        """One step; False when the training prompts are used up."""
        started = time.perf_counter()
        groups = self.fetch_generate_score_store()  # 1 to 4
        if not groups:
            return False
        # Asked for before the weights change: a service that is lost up to here leaves the step undone.
        replayed = self.sample_replay()
        update = self.update(groups)  # 5 and 6
        replay = self.replay_update(replayed)  # 7
        self.complete_step()
        metrics = self.describe(update, replay)
        try:
            self.tell_replay_buffer(replay)
            metrics |= self.publish()
            metrics["seconds_step"] = time.perf_counter() - started
            if self.is_due(self.settings.eval_every) or self.state.step == self.learner.total_steps:
                self.evaluate(metrics)
        except EXPECTED_ERRORS:
            try:
                self.record(metrics)
            except DiskFullError as full:
                self.is_recorded = False
                log.error("step not recorded", step=self.state.step, reason=str(full))
            raise
        self.record(metrics)
        if self.is_due(self.settings.checkpoint_every) or self.state.best_step == self.state.step:
            self.save_checkpoint()
        self.checkpoints.poll()
        self.forget_replay()
        return True

    def complete_step(self) -> None:
        """The weights are those of the next step: so is the state from here on, whatever service is lost."""
        self.state.step += 1
        self.state.policy_version += 1

        def cursor() -> Any:
            source = self._main().conductor.source
            assert source is not None
            return source.cursor().model_dump()

        self.state.cursor = Cursor.model_validate(self.ranks.on_main(cursor))

    def is_due(self, every: int) -> bool:
        """True after every so many steps; never for 0."""
        return every > 0 and self.state.step % every == 0

    def fetch_generate_score_store(self) -> list[TrainingGroup]:
        """Steps 1 to 4 on rank 0; every rank gets the groups to train on, with their advantages (step 5)."""
        version = self.state.policy_version

        def work() -> list[Any] | None:
            main = self._main()
            main.status.phase = "generate"
            deadline = self.settings.batch_deadline_seconds + GRACE_SECONDS
            generating = main.conductor.next_batch(version, partial(self.publisher.is_on_volume, version))
            batch = main.thread.call(generating, deadline, interruptible=True)
            if batch is None:
                return None
            main.batch = batch
            return _to_json([training_group(g, self.settings) for g in batch.groups])

        while (groups := self.ranks.on_main(work, *EXPECTED_ERRORS)) is None:
            log.warning("policy version is written again", policy_version=version, reason="it has gone from the volume")
            self.publisher.write(version)
        return _from_json(groups)

    def update(self, groups: list[TrainingGroup]) -> UpdateResult:
        """Step 6: the clipped surrogate update.

        Raises:
            TrainingDivergedError: it was not finite, as were those before.
        """
        self._phase("train")
        result = self.learner.update(
            groups, self.state.step, n_steps=self.settings.updates_per_batch, should_stop=self.should_stop
        )
        self._count_skipped(result, groups)
        return result

    def _count_skipped(self, result: UpdateResult, groups: Sequence[TrainingGroup]) -> None:
        """Counts updates in a row that were not finite."""
        self.skipped_in_a_row = self.skipped_in_a_row + result.skipped if result.skipped else 0
        if result.skipped:
            log.warning("update skipped: loss or gradient not finite", step=self.state.step + 1, **result.metrics)
        if self.skipped_in_a_row > MAX_SKIPPED_STEPS:
            path = self.settings.run_dir / f"diverged-step-{self.state.step + 1:06d}.json"
            if self.ranks.is_main:
                try:
                    path.write_bytes(orjson.dumps([asdict(g) for g in groups]))
                except OSError as error:
                    log.error("the last batch is not written", path=str(path), reason=str(error))
            raise TrainingDivergedError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(allowed are {MAX_SKIPPED_STEPS}); the last batch is in {path}. "
                "Lower LEARNING_RATE, or look for broken logprobs in that file."
            )

    def sample_replay(self) -> list[TrainingGroup]:
        """Groups from the replay buffer for step 7, on every rank."""
        if not self.settings.replay_groups:
            return []

        def work() -> list[Any]:
            main = self._main()
            sampling = main.conductor.sample_replay(self.state.step, self.state.policy_version, main.batch)
            main.replayed = main.thread.call(sampling, self.settings.service_deadline_seconds + GRACE_SECONDS)
            return _to_json([training_group(s.group, self.settings, s.weight) for s in main.replayed])

        return _from_json(self.ranks.on_main(work, *EXPECTED_ERRORS))

    def replay_update(self, groups: list[TrainingGroup]) -> UpdateResult:
        """Step 7: an additional update on groups from the replay buffer, corrected for being off-policy.

        Raises:
            TrainingDivergedError: it was not finite, as were those before.
        """
        if not groups:
            return UpdateResult()
        result = self.learner.update(groups, self.state.step, off_policy=True)
        if result.skipped:
            self._count_skipped(result, groups)
        return result

    def tell_replay_buffer(self, replay: UpdateResult) -> None:
        """Says which groups were trained on, and what the replayed ones were worth."""

        def work() -> None:
            main = self._main()
            # What a skipped update saw is not finite.
            seen = [] if replay.skipped else [s.group for s in main.replayed]
            deadline = self.settings.service_deadline_seconds + GRACE_SECONDS
            main.thread.call(main.conductor.finish_step(updated_priorities(seen, replay.signal)), deadline)

        self.ranks.on_main(work, *EXPECTED_ERRORS)

    def wait_for_workers(self) -> None:
        """Waits until MIN_WORKERS rollout workers have come up."""

        def work() -> None:
            main = self._main()
            deadline = self.settings.start_deadline_seconds
            main.thread.call(main.conductor.wait_for_workers(deadline), deadline + GRACE_SECONDS, interruptible=True)

        self.ranks.on_main(work, *EXPECTED_ERRORS)

    def publish(self) -> dict[str, float]:
        """Gives the rollout workers the policy."""
        self._phase("publish")
        started = time.perf_counter()
        if not self.settings.keep_memory:
            # Rollout workers on the same machine need room for the new weights beside the old.
            memory.release()
        metrics = self.publisher.publish(self.state.policy_version)
        if self.settings.publish_probe:
            metrics |= self.probe()
        metrics["seconds_publish"] = time.perf_counter() - started
        if self.main is not None:
            self.main.status.policy_version = self.state.policy_version
        return metrics

    def probe(self) -> dict[str, float]:
        """Compares the workers' log-probabilities of a completion of the last batch with the trainer's own."""

        def choose() -> list[Any]:
            groups = [training_group(g, self.settings) for g in self._main().batch.groups]
            return _to_json([replace(g, sequences=g.sequences[:1]) for g in groups if g.sequences][:1])

        probes = _from_json(self.ranks.on_main(choose))
        if not probes:
            return {}
        expected = self.learner.logprobs(probes[0])[0]

        def compare() -> float:
            completion_ids = probes[0].sequences[0].completion_ids
            probing = probe_workers(self.settings, probes[0].prompt_ids, completion_ids, expected)
            return self._main().thread.call(probing, PUBLISH_SECONDS + GRACE_SECONDS)

        return {"probe_difference": self.ranks.on_main(compare, *EXPECTED_ERRORS)}

    def evaluate(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluates on held-out prompts, adds the result to ``metrics`` and returns it, on every rank."""
        if not self.settings.eval_prompts:
            return {}

        def work() -> dict[str, float]:
            main = self._main()
            main.status.phase = "evaluate"
            started = time.perf_counter()
            deadline = self.settings.evaluation_deadline_seconds + GRACE_SECONDS
            result = main.thread.call(main.conductor.evaluator.evaluate(), deadline, interruptible=True)
            result["seconds_evaluate"] = time.perf_counter() - started
            main.files.record_evaluation(self.state.step, main.conductor.evaluator.samples)
            log.info("evaluated", step=self.state.step, **result)
            return result

        result: dict[str, float] = self.ranks.on_main(work, *EXPECTED_ERRORS)
        metrics |= result
        accuracy = result.get("accuracy")
        self.state.last_accuracy, self.state.evaluated_step = accuracy, self.state.step
        self.state.last_accuracy_stderr = result.get("accuracy_stderr")
        if accuracy is not None and accuracy > (self.state.best_accuracy or 0.0):
            self.state.best_accuracy = accuracy
            self.state.best_step = self.state.step or None
            if self.ranks.is_main:
                log.info("best so far", step=self.state.step, accuracy=describe_accuracy(result))
        if self.ranks.is_main and self.reached_target():
            log.info("TARGET_ACCURACY reached", target=self.settings.target_accuracy, best=self.state.best_accuracy)
        return result

    def reached_target(self) -> bool:
        """Return whether an evaluation's greedy pass@1, a point estimate, was at least TARGET_ACCURACY."""
        target = self.settings.target_accuracy
        return target is not None and (self.state.best_accuracy or 0.0) >= target

    def save_checkpoint(self, *, wait: bool = False) -> None:
        """Starts a checkpoint of the last completed step, together with the replay buffer's contents."""
        self._phase("save")
        label = f"{self.settings.run_id}-step-{self.state.step:06d}"

        def snapshot() -> None:
            main = self._main()
            main.thread.call(main.conductor.save_replay(label), self.settings.service_deadline_seconds + GRACE_SECONDS)

        try:
            self.ranks.on_main(snapshot, *EXPECTED_ERRORS)
            self.state.replay_snapshot = label
        except DependencyLostError as error:
            # Weights are worth more than replay: a run that resumes from here starts with an empty buffer.
            log.warning("checkpoint without the replay buffer's contents", reason=str(error))
            self.state.replay_snapshot = None
        self.state.seconds = time.monotonic() - self.started
        self.state.random_state = torch.get_rng_state().tolist()
        self.checkpoints.save(self.policy, self.learner.optimizer, self.state.model_copy(deep=True), wait=wait)
        log.info("checkpoint", step=self.state.step, directory=str(self.settings.checkpoint_dir))

    def forget_replay(self) -> None:
        """Lets the replay buffer forget what it kept for checkpoints that are gone."""
        if self.main is None:
            return
        for label in self.checkpoints.take_removed_snapshots():
            try:
                deadline = self.settings.service_deadline_seconds + GRACE_SECONDS
                self.main.thread.call(self.main.conductor.forget_replay(label), deadline)
            except DependencyLostError as error:
                log.warning("a snapshot of the replay buffer stays", snapshot=label, reason=str(error))

    def describe(self, update: UpdateResult, replay: UpdateResult) -> dict[str, float]:
        """The metrics of a step, on rank 0."""
        if self.main is None:
            return {}
        batch = self.main.batch
        metrics = group_metrics(batch.groups, self.state.policy_version - 1) | batch.counts
        metrics |= {f"seconds_{name}": value for name, value in batch.seconds.items()}
        metrics |= update.metrics
        metrics |= {f"replay_{name}": value for name, value in replay.metrics.items() if name != "learning_rate"}
        metrics["replay_groups"] = float(len(self.main.replayed))
        metrics["seconds_train"] = update.seconds + replay.seconds
        metrics["updates_skipped"] = float(update.skipped + replay.skipped)
        metrics["trained_tokens"] = float(update.tokens + replay.tokens)
        metrics["trained_tokens_per_second"] = metrics["trained_tokens"] / max(metrics["seconds_train"], 1e-9)
        metrics["policy_version"] = float(self.state.policy_version)
        metrics["peak_memory_bytes"] = float(peak_memory_bytes())
        return metrics

    def record(self, metrics: dict[str, float]) -> None:
        """Writes a step's metrics and samples, and its line in the log."""
        reward = metrics.get("reward_mean")
        self.state.rewards += self.ranks.broadcast_json([] if reward is None else [reward])

        def write() -> None:
            main = self._main()
            with writing(self.settings.run_dir):
                main.files.record_step(self.state.step, metrics, main.batch.groups)
            main.status.step, main.status.metrics = self.state.step, metrics
            log.info(f"step {self.state.step}/{self.learner.total_steps}", **_headline(metrics))

        self.ranks.on_main(write, DiskFullError)

    def _phase(self, name: str) -> None:
        if self.main is not None:
            self.main.status.phase = name

    def _main(self) -> Main:
        assert self.main is not None, "only rank 0 talks to the services"
        return self.main


def peak_memory_bytes() -> int:
    """The most memory that this process, or its GPU, has held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _headline(metrics: dict[str, float]) -> dict[str, str]:
    names = {
        "reward_mean": "reward",
        "accuracy": "accuracy",
        "loss": "loss",
        "entropy": "entropy",
        "length_mean": "length",
        "staleness_max": "staleness",
    }
    line = {short: f"{metrics[name]:.3g}" for name, short in names.items() if name in metrics}
    phases = ("wait", "generate", "score", "store", "train", "publish", "evaluate", "step")
    return line | {name: f"{metrics[f'seconds_{name}']:.2f}s" for name in phases if f"seconds_{name}" in metrics}


def _to_json(groups: Sequence[TrainingGroup]) -> list[Any]:
    return [asdict(group) for group in groups]


def _from_json(groups: list[Any]) -> list[TrainingGroup]:
    return [
        TrainingGroup(g["prompt_ids"], [TrainingSequence(**s) for s in g["sequences"]], g["group_id"]) for g in groups
    ]
