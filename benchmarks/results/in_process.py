"""A training run within one process, without services: the trainer's update, the buffer's draw, the embedded engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.results.runs import Result, Run, Settings, result_of
from benchmarks.results.tasks import REWARDS, Reward, with_model
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import load
from services.embedded_engine.compute.sequences import Sequence as Completion
from services.embedded_engine.http.requests import SamplingParams, make_request
from services.engines.settings import EngineSettings
from services.protocol.base import derive_seed
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor, Prompt, Split
from services.protocol.rewards import FinishReason, RewardResult
from services.replay_buffer.priority_index import PriorityIndex
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.teachers import with_teacher
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.critic import CriticLearner
from trainer.model.gathering import gather_state
from trainer.model.learner import Learner
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.rounding import MeasuredRounding
from trainer.model.teachers import load_teachers
from trainer.publishing.publisher import VersionWriter
from trainer.rollouts.batch import REPLAY_CORRECTION, REPLAY_EXPONENT, Batch, within_kl
from trainer.rollouts.evaluate import sample_metrics

STEP_SECONDS = "step_processor_seconds"
"""The figure with the processor time of all steps, without that of loading and of the evaluation."""


def train(run: Run, rounding: Callable[[Policy], None] | None = None, *, lag: int = 0) -> Result:
    """Train in this process by the run's settings, evaluate the trained policy, and return the measurements.

    Args:
        run: the run.
        rounding: replaces the rounding of a policy's weights; without it, that of PUBLISH_TYPE.
        lag: the engine serves the weights of ``lag`` steps ago, as in an asynchronous run with that staleness.
    """
    started = time.process_time()
    result = result_of(run)
    with join_ranks() as ranks, with_model(run.settings) as settings:
        InProcess(settings, REWARDS[settings["REWARD_FN"]], ranks, rounding, lag).train(result)
    result.processor_seconds = time.process_time() - started
    return result


def evaluate(run: Run, *, best: bool = False) -> Result:
    """Evaluate the untrained policy; its mean reward is that of its answers to the held-out prompts.

    Args:
        run: the run.
        best: count the best of the EVAL_SAMPLES answers to a prompt only, as a verifier would choose it.
    """
    started = time.process_time()
    result = result_of(run)
    with join_ranks() as ranks, with_model(run.settings) as settings:
        InProcess(settings, REWARDS[settings["REWARD_FN"]], ranks).evaluate_untrained(result, best=best)
    result.processor_seconds = time.process_time() - started
    return result


class InProcess:
    """A run of the trainer that generates, scores, stores, replays, updates and publishes in this process."""

    def __init__(
        self,
        settings: Settings,
        reward: Reward,
        ranks: Ranks,
        rounding: Callable[[Policy], None] | None = None,
        lag: int = 0,
    ) -> None:
        """Load everything by ``settings``, which are environment variables of the trainer, the data and the engine."""
        lowered = {name.lower(): value for name, value in settings.items()}
        self.settings = TrainerSettings.load(**lowered)
        self.objective = Objective(self.settings)
        self.reward, self.ranks, self.lag = reward, ranks, lag
        self.data = Batches.load(DataSettings.load(**lowered))
        self.cursor = Cursor()
        self.policy = load_policy(self.settings, ranks)
        needs_reference = self.settings.kl_coef > 0 and not self.policy.has_adapters
        reference = load_policy(self.settings, ranks, trainable=False) if needs_reference else None
        teachers = load_teachers(self.settings, self.policy, ranks)
        self.learner = Learner(self.settings, self.policy, ranks, reference, self.settings.max_steps, teachers)
        self.critic = CriticLearner(self.learner) if self.settings.has_critic else None
        self.rounding = VersionWriter(self.settings, self.policy, ranks).rounding
        if rounding is not None:
            rounding(self.policy)
        self.loaded = load(EngineSettings.load(**lowered))
        self.engine = Engine(self.loaded, on_failure=print)
        self.index = PriorityIndex()
        self.stored: list[Group] = []
        """All groups by sequence number."""
        self.position: dict[str, int] = {}
        """The position of each group in the index."""
        self.version = 0
        """The version that the engine serves: the number of steps that made it."""
        self.waiting: deque[tuple[int, dict[str, Tensor]]] = deque()
        """Versions with their weights that the engine does not serve yet, the oldest first."""

    def train(self, result: Result) -> None:
        """Train for MAX_STEPS steps, evaluate the last policy, and write the measurements to ``result``."""
        self.engine.start()
        try:
            started = time.process_time()
            for step in range(self.settings.max_steps):
                self._step(step, result)
            result.figures[STEP_SECONDS] = time.process_time() - started
            while self.waiting:
                self._serve_next()
            if self.settings.eval_prompts and self.settings.eval_samples:
                self.evaluate(result, "avg")
        finally:
            self.engine.stop()

    def evaluate_untrained(self, result: Result, *, best: bool) -> None:
        """Evaluate the policy as it is, and write the measurements to ``result``."""
        self.engine.start()
        try:
            groups = self.evaluate(result, "pass" if best else "avg")
        finally:
            self.engine.stop()
        rewards = np.array([group.rewards for group in groups])
        result.rewards = [float((rewards.max(axis=1) if best else rewards).mean())]
        result.tokens = [sum(e.tokens for group in groups for e in group.sequences)]

    def _step(self, step: int, result: Result) -> None:
        """Take one step in the order of TrainingLoop.step."""
        started = time.perf_counter()
        batch = Batch(self.objective)
        while batch.missing:
            batch.add(self.sampled(sum(batch.missing.values())))
        fresh = self.taught(batch.groups)
        self._store(fresh)
        replayed = self._draw(step, fresh)
        kept = within_kl(replayed, self.learner.logprobs(replayed), self.settings.replay_max_kl) if replayed else []
        groups = [*batch.prepared(fresh), *kept]
        reference = self.learner.reference_logprobs(groups) if self.settings.kl_in_reward else None
        values = None if self.critic is None else self.critic.values(groups)
        groups = self.objective.with_advantages(groups, reference, values)
        self.learner.update(groups, step)
        if self.critic is not None and self.critic.trains_alone(step):
            self.critic.update(groups, step)
        for group in groups:
            self.index.set_priority(self.position[group.group_id], self.objective.priority(group))
        self.end_step(step, batch.scored, started, result)
        measured = self.policy.masters.rounding
        if isinstance(measured, MeasuredRounding) and (share := measured.share(self.ranks)) is not None:
            result.figures["publish_share"] = share
        for name, count in (("replayed", len(kept)), ("left_out", len(replayed) - len(kept))):
            result.figures[name] = result.figures.get(name, 0) + count

    def sampled(self, n: int) -> list[Group]:
        """Return scored groups of the next ``n`` prompts."""
        prompts, self.cursor = self.data.batch(Split.TRAIN, self.cursor, n)
        seeds = [derive_seed(self.settings.seed, prompt["epoch"], prompt["position"]) for prompt in prompts]
        sampling = SamplingParams(n=self.settings.group_size, temperature=self.settings.temperature)
        return self._make_groups(prompts, seeds, sampling)

    def end_step(self, step: int, groups: Sequence[Group], started: float, result: Result) -> None:
        """Have the engine serve the updated weights, and write what a step has sampled to ``result``."""
        self._publish(step + 1)
        result.rewards.append(float(np.mean([group.rewards for group in groups])))
        result.tokens.append(sum(e.tokens for group in groups for e in group.sequences))
        result.seconds.append(time.perf_counter() - started)

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the log-probabilities of their teacher, if the run has one."""
        if not self.learner.teachers:
            return list(groups)
        scores = self.learner.teacher_logprobs([TrainingGroup(g.prompt_ids, g.sequences, g.group_id) for g in groups])
        return [g if s is None else with_teacher(g, s) for g, s in zip(groups, scores, strict=True)]

    def _publish(self, version: int) -> None:
        """Gather the weights, and have the engine serve those of ``lag`` versions before."""
        state = gather_state(self.policy.full_parameters(self.rounding), self.ranks, copy=True)
        self.waiting.append((version, state))
        if len(self.waiting) > self.lag:
            self._serve_next()

    def _serve_next(self) -> None:
        self.version, state = self.waiting.popleft()
        self.engine.change_weights(self.loaded.pack(state), str(self.version), keeps_caches=False).result()

    def evaluate(self, result: Result, estimate: str) -> list[Group]:
        """Sample EVAL_SAMPLES answers at temperature 1 to each of EVAL_PROMPTS held-out prompts.

        The accuracy is avg@k or pass@k, as ``estimate`` says.
        """
        settings = self.settings
        prompts, _ = self.data.batch(Split.TEST, Cursor(), settings.eval_prompts)
        seeds = [derive_seed(settings.seed, "evaluation", prompt["id"]) for prompt in prompts]
        sampling = SamplingParams(n=settings.eval_samples, temperature=1.0)
        groups = self._make_groups(prompts, seeds, sampling)
        measured = sample_metrics([[e.scoring for e in group.sequences] for group in groups], settings.eval_samples)
        result.accuracy = measured[f"{estimate}_at_{settings.eval_samples}"]
        result.accuracy_error = measured[f"{estimate}_at_{settings.eval_samples}_stderr"]
        result.prompts, result.samples = len(groups), settings.eval_samples
        return groups

    def _make_groups(
        self, prompts: Sequence[Mapping[str, Any]], seeds: Sequence[int], sampling: SamplingParams
    ) -> list[Group]:
        """Sample completions of each prompt with its seed by the policy that the engine serves."""
        requests = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            changes = {"max_new_tokens": self.settings.max_new_tokens, "sampling_seed": seed}
            params = sampling.model_copy(update=changes)
            requests.append(make_request(prompt["prompt_ids"], params, self.loaded))
            self.engine.submit(requests[-1])
        return [
            Group(
                group_id=f"{prompt['epoch']}-{prompt['position']}",
                prompt=Prompt.model_validate(prompt),
                sequences=[self._score(sequence, prompt) for sequence in request.done.result().sequences],
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _score(self, sequence: Completion, prompt: Mapping[str, Any]) -> TokenSequence:
        text = self.loaded.decode_text(sequence.output_ids, True)
        assert sequence.finish is not None
        return TokenSequence(
            completion=text,
            completion_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            policy_versions=[self.version] * len(sequence.output_ids),
            finish_reason=FinishReason(sequence.finish["type"]),
            result=RewardResult(reward=self.reward(prompt["prompt"], text, prompt["ground_truth"])),
        )

    def _store(self, groups: Sequence[Group]) -> None:
        highest = self.index.highest_priority()
        for group in groups:
            self.position[group.group_id] = self.index.add(len(self.stored), group.policy_version, highest)
            self.stored.append(group)

    def _draw(self, step: int, fresh: Sequence[Group]) -> list[TrainingGroup]:
        settings = self.settings
        if settings.replay_groups == 0:
            return []
        draws = self.index.draw(
            settings.replay_groups,
            np.random.default_rng(derive_seed(settings.seed, "replay", step)),
            exponent=REPLAY_EXPONENT,
            correction=REPLAY_CORRECTION,
            least_version=max(step - settings.replay_max_staleness, 0),
            exclude=[self.position[group.group_id] for group in fresh],
        )
        make = self.objective.training_group
        return [make(self.stored[d.sequence], weight=d.weight, is_replayed=True) for d in draws]
