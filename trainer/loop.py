"""The driver of a run: the seven steps of GRPO with replay, then publishing, evaluation and checkpoints.

Rank 0 runs it. ``services`` has its calls to the services, and ``rank_calls`` those that all ranks make together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.core.endpoints import tiers_are_apart
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.settings import Method
from services.core.tasks import InterruptedCallError
from services.engines.engine import WorkerRefusedError
from services.protocol.groups import Group
from services.run_page.progress import of_sources
from trainer.algorithm.gae import critic_metrics
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.teachers import is_taught, teacher_metrics, with_teacher
from trainer.checkpoints.run_checkpoints import RunCheckpoints
from trainer.checkpoints.state import RunState, note_accuracy, reached_target
from trainer.config import Mode, TrainerSettings
from trainer.config.objective import Objective
from trainer.model.learner import UpdateResult
from trainer.model.optimizer import StopRequestedError
from trainer.model.saving import DiskFullError, writing
from trainer.publishing.proof import is_unusual, name_part, to_score
from trainer.publishing.publisher import Publisher
from trainer.rank_calls import ENDINGS, RankCalls, TrainingDivergedError, computation
from trainer.reporting.profiles import StepProfile
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.reporting.step_metrics import headline, step_metrics
from trainer.rollouts.batch import Batch, within_kl
from trainer.rollouts.service_calls import ServiceCalls
from trainer.waves import Waves, wave_size

log = get_logger(__name__)

ENTROPY_EVERY = 10
"""Steps between two measurements of the entropy over all tokens, each of which takes a forward pass."""
OVERLAP_K = 8
"""Most likely tokens of the policy that are looked for among the teacher's."""
MAX_SKIPPED_STEPS = 3
"""Steps in a row, all of whose updates are skipped as not finite, before the run stops: one bad batch does not mean
divergence."""


@dataclass
class TrainingLoop:
    """A run on rank 0, from its first step or from a checkpoint to its end."""

    settings: TrainerSettings
    services: ServiceCalls
    rank_calls: RankCalls
    files: RunFiles
    status: RunStatus
    state: RunState
    total_steps: int
    total_prompts: float
    """The prompts of all epochs; infinite with SOURCES."""
    skipped_in_a_row: int = 0
    has_slept: bool = False
    """True once engines have slept in this process (ENGINE_SLEEPS)."""
    is_recorded: bool = True
    """False once the metrics of a completed step could not be written."""

    def __post_init__(self) -> None:
        rank_calls = self.rank_calls
        self.objective = Objective(self.settings, self.state.role_baselines)
        self.enter = self.status.begin
        """Enters a phase of the step, to which the time from here on belongs, and describes it to people."""
        thread, writer = self.services.thread, rank_calls.writer
        on_all_ranks = self.on_all_ranks = rank_calls.on_all_ranks
        self.learner = rank_calls.learner
        self.publisher = Publisher(
            self.settings, thread, writer, on_all_ranks(writer.write), on_all_ranks(writer.release)
        )
        self.status.refusals = self.publisher.prover.refusals
        self.checkpoints = RunCheckpoints(self.settings, self.state, self.services, rank_calls)
        self.profile = StepProfile(self.settings, rank_calls.ranks.device, self.services.ask_engines)
        self.computation = computation(rank_calls.learner.policy, rank_calls.ranks)
        self.has_waves = self.settings.trains_while_generating(are_tiers_apart=tiers_are_apart())
        self.wave_size = wave_size(self.settings, rank_calls.ranks.n_shares)
        self.add_wave = on_all_ranks(rank_calls.learner.add_wave)

    def run(self) -> None:
        """Train to the end.

        Raises:
            InterruptedCallError: the run was asked to stop; a checkpoint of the last completed step is in place.
            TrainingDivergedError: updates were not finite; the last batch is in the run directory.
            DependencyLostError: a service was lost; a checkpoint of the last completed step is in place.
            ConfigurationError: no prompt gets a group any more; a checkpoint of the last completed step is in place.
            DiskFullError: the run directory's disk is full; the newest whole checkpoint is in place.
        """
        try:
            if self.settings.needs_engines:
                self.enter("publish", "writing the first policy version")
                # The version is written before the wait for workers, because an engine that starts may wait for it.
                self.remember_answers()
                self.on_all_ranks(self.rank_calls.writer.write)(self.state.policy_version)
                self.services.wait_for_workers(self.publisher.keep_on_volume)
                self.publish()
            if self.state.step == 0:
                self.evaluate_outside_steps()
            self.status.clock.lap()
            while not self.is_over and self.step():
                pass
            if self.state.evaluated_step != self.state.step:
                # METHOD=sft publishes only what is evaluated, and the prompts may end between two evaluations.
                if self.settings.needs_engines and self.status.policy_version != self.state.policy_version:
                    self.publish()
                self.evaluate_outside_steps(is_last=True)
            self.save_checkpoint(wait=True)
        except (InterruptedCallError, StopRequestedError, DependencyLostError, ConfigurationError) as error:
            self.checkpoints.leave(error, is_recorded=self.is_recorded)
            if isinstance(error, StopRequestedError):
                raise InterruptedCallError from error
            raise
        finally:
            self.profile.close()
            self.checkpoints.note_seconds()
        self.checkpoints.poll()

    def step(self) -> bool:
        """Take one training step, numbered as in docs/architecture.md; return False when no training prompt is left."""
        settings, services, state = self.settings, self.services, self.state
        self.profile.begin(state.step + 1)
        batch = Batch(self.objective, self.quotas)
        if self.has_waves:
            is_in_order = self.rank_calls.ranks.device.type == "cpu"
            batch.waves = Waves(batch, self.wave_size, self.add_wave, is_in_order=is_in_order)
        self.get_groups(batch)  # 1. to 4.
        if not batch.groups:
            return False
        # Drawn before the weights change: a service that is lost up to here leaves the step undone.
        self.enter("replay", "drawing groups of earlier steps")
        services.draw_replayed(batch, state.step, state.policy_version)  # 5. replay
        self.teach(batch)

        groups = self.training_groups(batch)  # 6. advantages
        self.enter("train", f"training step {state.step + 1}")
        self.measure_entropy(batch)
        position = self.position
        update = self.update(groups, batch.waves)  # 7. update
        # The weights are those of the next step, and so is the state from here on, whichever service is lost.
        state.step, state.policy_version = state.step + 1, state.policy_version + 1
        state.cursors = dict(services.cursors)
        state.prompts_used += batch.prompts_used
        state.role_baselines = {**self.objective.role_baselines}

        made = batch.scored if settings.dynamic_sampling_tries or len(batch.scored) > len(batch.groups) else ()
        is_sampled = settings.method is Method.RL
        metrics = batch.counts | step_metrics(batch.groups, made, update, state.policy_version, is_sampled=is_sampled)
        metrics |= {} if batch.waves is None else {"overlap_seconds": batch.waves.overlap_seconds}
        metrics |= teacher_metrics(batch.groups, settings.teachers)
        with self.recording(batch, groups, position, metrics):
            self.enter("store", "acknowledging the groups")
            services.acknowledge({group.group_id: self.objective.priority(group) for group in groups})
            is_evaluated = self.is_due(settings.eval_every) or state.step == self.total_steps
            if is_sampled or (is_evaluated and settings.needs_engines):
                metrics |= self.publish()
                metrics |= self.split_mismatch(batch, metrics, update.steps)
            if is_evaluated:
                metrics |= self.evaluate(is_last=state.step == self.total_steps)
            self.enter("record", "asking for the account of tokens")
            metrics |= services.statistics()
        self.enter("save", f"saving what step {state.step} has changed")
        is_due = self.is_due(settings.checkpoint_every) or self.is_due(settings.keep_checkpoints_every)
        if not self.is_over and (is_due or state.best_step == state.step):
            self.save_checkpoint()
        self.checkpoints.poll()
        self.profile.end(state.step)
        return True

    def get_groups(self, batch: Batch) -> None:
        """Fill the batch with new groups, which the replay buffer has, too: steps 1 to 4."""
        if self.settings.mode is Mode.ASYNC:
            self.enter("wait", f"waiting for the groups of step {self.state.step + 1}")
            # Collectors have taken these steps.
            self.services.lease_groups(batch, self.state.policy_version, self.publisher.keep_on_volume)
        else:
            self.make_groups(batch)  # 1. fetch, 2. generate, 3. score
            batch.groups = self.taught(batch.groups)
            self.enter("store", "storing the groups")
            self.services.store(batch)  # 4. store

    def make_groups(self, batch: Batch) -> None:
        """Fill the batch with scored groups of new prompts: steps 1 to 3."""
        while batch.missing:
            self.enter("fetch", f"fetching prompts for step {self.state.step + 1}")
            prompts = self.services.fetch_prompts(batch.missing)  # 1. fetch
            if not prompts:
                return
            batch.prompts_used += len(prompts)
            self.enter("generate", f"generating completions for step {self.state.step + 1}")
            # 2. generate, 3. score
            batch.add(self.services.generate_and_score(prompts, batch, self.publisher.keep_on_volume))
            self.status.clock.move(batch.seconds_scoring, "score")
            self.status.clock.move(batch.seconds_training, "train")

    def training_groups(self, batch: Batch) -> list[TrainingGroup]:
        """Return the groups to train on, fresh and replayed, with their advantages.

        Replayed groups that the policy has moved too far from are left out and counted.
        """
        settings = self.settings
        self.services.free_engines_memory()
        if settings.engine_sleeps and not self.has_slept:
            self.on_all_ranks(self.rank_calls.compare_asleep)()
            self.has_slept = True
        groups = batch.prepared(batch.groups)
        if batch.replayed:
            make = self.objective.training_group
            replayed = [make(s.group, weight=s.weight, is_replayed=True) for s in batch.replayed]
            kept = within_kl(replayed, self.on_all_ranks(self.learner.logprobs)(replayed), settings.replay_max_kl)
            batch.counts |= {"replay_groups": len(kept), "replay_groups_left_out": len(replayed) - len(kept)}
            groups += kept
        self.enter("train", "computing advantages")
        reference = values = None
        if settings.kl_in_reward:
            self.enter("reference", "computing the reference's log-probabilities")
            reference = self.on_all_ranks(self.learner.reference_logprobs)(groups)
        if settings.has_critic:
            self.enter("values", "computing the critic's values")
            assert self.rank_calls.critic is not None
            values = self.on_all_ranks(self.rank_calls.critic.values)(groups)
        groups = self.objective.with_advantages(groups, reference, values)
        batch.counts |= critic_metrics(groups) if settings.has_critic else self.objective.metrics
        return groups

    @property
    def quotas(self) -> dict[str, int]:
        """The number of groups of each source in the next step, by the schedule."""
        first = self.state.step * self.settings.batch_size
        return self.settings.schedule.counts(first, first + self.settings.batch_size)

    def teach(self, batch: Batch) -> None:
        """Have the teachers in the trainer score the groups that they have not scored yet, fresh and replayed."""
        batch.groups = self.taught(batch.groups)
        replayed = self.taught([sampled.group for sampled in batch.replayed])
        pairs = zip(batch.replayed, replayed, strict=True)
        batch.replayed = [sampled.model_copy(update={"group": group}) for sampled, group in pairs]

    def taught(self, groups: list[Group]) -> list[Group]:
        """Return the groups with their teacher's log-probabilities, which stay with them wherever they are stored."""
        new = [group for group in groups if not any(map(is_taught, group.sequences))]
        if not new or not self.settings.teacher_models:
            return groups
        self.enter("teach", "computing the teachers' log-probabilities")
        whole = [TrainingGroup(g.prompt_ids, g.sequences, g.group_id, source=g.prompt.source) for g in new]
        scores = zip(new, self.on_all_ranks(self.learner.teacher_logprobs)(whole), strict=True)
        scored = {id(group): with_teacher(group, numbers) for group, numbers in scores if numbers is not None}
        return [scored.get(id(group), group) for group in groups]

    def measure_entropy(self, batch: Batch) -> None:
        """Every ENTROPY_EVERY steps, measure the entropy over all groups made, and how far teachers agree with it.

        The update skips some of the groups.
        """
        if self.state.step % ENTROPY_EVERY == 0 and self.settings.method is Method.RL:
            entropy = self.on_all_ranks(self.learner.mean_entropy)(batch.prepared(batch.scored))
            batch.counts |= {} if entropy is None else {"entropy_all": entropy}
            if self.settings.teacher_models:
                overlap = self.on_all_ranks(self.learner.teacher_overlap)(batch.prepared(batch.groups), OVERLAP_K)
                batch.counts |= {} if overlap is None else {"teacher_overlap": overlap}

    @property
    def position(self) -> float:
        """The next step's position in the schedule of the learning rate, in steps."""
        # Groups that were left out use up data, so that the last step comes before ``total_steps``.
        return max(self.state.step, self.state.prompts_used * self.total_steps / self.total_prompts)

    def update(self, groups: Sequence[TrainingGroup], waves: Waves | None = None) -> UpdateResult:
        """Update the policy on ``groups`` by the loss that the settings choose, or on those that ``waves`` has left.

        Raises:
            TrainingDivergedError: no update of the step was finite, nor of the steps before it.
        """
        if waves is None:
            result = self.on_all_ranks(self.rank_calls.update)(groups, self.state.step, self.position)
        else:
            waves.finish(groups)
            result = self.on_all_ranks(self.rank_calls.finish_waves)(self.state.step, self.position)
        if result.skipped:
            log.warning("update skipped: loss or gradient not finite", step=self.state.step + 1, **result.metrics)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.is_without_effect else 0
        if self.skipped_in_a_row > MAX_SKIPPED_STEPS:
            raise TrainingDivergedError(
                f"the updates of {self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
                f"(allowed are {MAX_SKIPPED_STEPS}); the last batch is in "
                f"{self.files.keep_batch(self.state.step + 1, groups)}. "
                "Lower LEARNING_RATE, or look for broken logprobs in that file."
            )
        return result

    def publish(self) -> dict[str, float]:
        """Make the rollout workers serve the policy, and return the metrics of it."""
        version = self.state.policy_version
        way = f" over the shared volume, because no broadcast works: {self.publisher.refusal}"
        way = way if self.publisher.refusal else ""
        self.enter("publish", f"publishing policy version {version} to the rollout workers{way}")
        remembering = self.remember_answers()
        self.on_all_ranks(self.rank_calls.leave_gpu)()  # for engines that wake and take their memory back
        metrics = self.publisher.publish(version)
        if "proof_seconds" in metrics:
            metrics["proof_seconds"] += remembering
        self.status.policy_version = version
        return metrics

    def split_mismatch(self, batch: Batch, metrics: dict[str, float], updates: int) -> dict[str, float]:
        """Say which part of an unusual ``kl_behaviour`` is wrong, and return the metrics of it.

        Newly published weights are those of trainer and workers, so what they say of a few of the step's completions
        has neither staleness nor wrong weights in it. With several updates a step the metric is no mismatch.
        """
        kl, staleness = metrics.get("kl_behaviour", 0.0), metrics.get("staleness_max", 0.0)
        usual, policy = self.publisher.prover.difference, self.learner.policy
        if updates > 1 or not is_unusual(kl, usual, staleness):
            return {}
        groups = to_score(batch.prepared(batch.groups), policy.config.vocab_size)
        ours = self.on_all_ranks(self.learner.logprobs)(groups, temperature=1.0)
        try:
            theirs = self.publisher.rescored([[*g.prompt_ids, *g.sequences[0].completion_ids.tolist()] for g in groups])
        except (WorkerRefusedError, DependencyLostError) as error:
            log.warning("a mismatch cannot be split", reason=str(error))
            return {}
        distances = [
            min(abs(a - b), 1.0)
            for (own,), all_ in zip(ours, theirs, strict=True)
            for a, b in zip(own, all_[-len(own) :], strict=True)
        ]
        if not distances:
            return {}
        residual = statistics.fmean(distances)
        part, sentence = name_part(kl, residual, usual, staleness)
        log.warning(sentence, part=part, step=self.state.step)
        return {"gap_residual": residual}

    def remember_answers(self) -> float:
        """Compute the answers by which workers prove the policy's version; return the seconds."""
        started = time.perf_counter()
        logprobs = self.on_all_ranks(self.learner.logprobs)
        self.publisher.prover.remember(self.state.policy_version, self.learner.policy, logprobs)
        return time.perf_counter() - started

    def evaluate(self, *, is_last: bool = False) -> dict[str, float]:
        """Evaluate on held-out prompts, note the accuracy in the state, and return the metrics of it.

        If every prompt fails in the last evaluation, return no metrics, so that the model is still saved.
        """
        if not self.settings.evaluates:
            return {}
        when = f"after step {self.state.step}" if self.state.step else "before the first step"
        self.enter("evaluate", f"evaluating {when}")
        try:
            metrics = self.services.evaluate()
        except ConfigurationError as error:
            if not is_last:
                raise
            log.error("the last evaluation failed; the model is saved without it", reason=str(error))
            note_accuracy(self.settings, self.state, {})
            self.state.evaluation_error = str(error)
            return {}
        self.state.evaluation_error = self.services.evaluator.failure
        with writing(self.settings.run_dir):
            self.files.record_evaluation(self.state.step, self.services.evaluator.samples)
        log.info("evaluated", step=self.state.step, **metrics)
        note_accuracy(self.settings, self.state, metrics)
        return metrics

    def evaluate_outside_steps(self, *, is_last: bool = False) -> None:
        """Evaluate before the first step, or once prompts have run out, when the last step is already recorded.

        metrics.jsonl has one line a step, so its readers find these accuracies in summary.json.
        """
        metrics = self.evaluate(is_last=is_last)
        with writing(self.settings.run_dir):
            self.files.show(self.state.step, metrics)

    def save_checkpoint(self, *, wait: bool = False) -> None:
        """Start a checkpoint of the last completed step; ``wait`` until it is in place."""
        self.enter("save", f"saving a checkpoint of step {self.state.step}")
        self.checkpoints.save(wait=wait)

    @property
    def is_over(self) -> bool:
        """True after the last step, whose checkpoint ``run`` saves."""
        return self.state.step >= self.total_steps or reached_target(self.settings, self.state)

    def is_due(self, every: int) -> bool:
        """Return whether the completed step is a multiple of ``every``; never for 0."""
        return every > 0 and self.state.step % every == 0

    @contextmanager
    def recording(
        self, batch: Batch, groups: Sequence[TrainingGroup], position: float, metrics: dict[str, float]
    ) -> Iterator[None]:
        """Record the completed step after the block, and also when the run ends in it."""
        try:
            yield
        except ENDINGS:
            try:
                self.record(batch, groups, position, metrics)
            except DiskFullError as full:
                self.is_recorded = False
                log.error("step not recorded", step=self.state.step, reason=str(full))
            raise
        self.record(batch, groups, position, metrics)

    def record(self, batch: Batch, groups: Sequence[TrainingGroup], position: float, metrics: dict[str, float]) -> None:
        """Write the step's groups, samples and metrics, and its line in the log."""
        self.state.rewards += [metrics["reward_mean"]] if "reward_mean" in metrics else []
        for source, reward in of_sources(metrics, "reward_mean").items():
            self.state.rewards_by_source.setdefault(source, []).append(reward)
        self.enter("record", f"recording step {self.state.step}")
        assert self.state.fingerprint is not None, "rank 0 has the model's description"
        unrecorded = self.files.groups.write(
            self.state.step,
            groups,
            [*batch.groups, *(sampled.group for sampled in batch.replayed)],
            policy_version=self.state.policy_version - 1,
            position=position,
            total_steps=self.total_steps,
            tokenizer=self.state.fingerprint.tokenizer,
            computation=self.computation,
            waves=[] if batch.waves is None else batch.waves.sizes(groups),
        )
        metrics |= {"groups_unrecorded": float(unrecorded)} if unrecorded else {}
        with writing(self.settings.run_dir):
            self.files.record_samples(self.state.step, batch.groups, groups)
            metrics |= self.status.clock.lap()
            self.files.record_step(self.state.step, metrics, batch.scored, groups)
        self.files.diagnose(self.state.accuracy_before_low)
        self.status.step, self.status.metrics = self.state.step, metrics
        log.info(f"step {self.state.step}/{self.total_steps}", **headline(metrics))
