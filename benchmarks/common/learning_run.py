"""A training run within one process, without services: the trainer's update, the buffer's draw, the embedded engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.core.seeds import derive_seed
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import load
from services.embedded_engine.compute.sequences import Sequence as Completion
from services.embedded_engine.http.requests import SamplingParams, make_request
from services.embedded_engine.settings import EngineSettings
from services.protocol.groups import Experience, FinishReason, Group, RewardResult, VersionSpan
from services.protocol.prompts import Cursor, Split
from services.replay_buffer.priorities import PriorityIndex
from trainer.algorithm.critic_targets import with_critic_targets
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import training_group, with_advantages
from trainer.config import TrainerSettings
from trainer.model.critic import CriticLearner
from trainer.model.gathering import gather_state
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.publishing.disk import published_dtype
from trainer.rollouts.replay import within_kl

Reward = Callable[[str, str, str], float]
"""The reward of a prompt, its ground truth and a completion, as text."""


@dataclass
class Curve:
    """The steps of one run."""

    task: str
    variant: str
    seed: int
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's fresh completions."""
    replayed: list[int] = field(default_factory=list)
    """Replayed groups of each step."""
    left_out: list[int] = field(default_factory=list)
    """Groups of each step that were drawn and left out for their KL."""
    seconds: float = 0.0
    """Processor time of all steps."""


class LearningRun:
    """A run of the trainer that generates, scores, stores, replays, updates and publishes in this process."""

    def __init__(self, settings: Mapping[str, str], reward: Reward, ranks: Ranks) -> None:
        """Load everything by ``settings``, which are environment variables of the trainer, the data and the engine."""
        given = {name.lower(): value for name, value in settings.items()}
        self.settings = TrainerSettings.load(**given)
        self.reward, self.ranks = reward, ranks
        self.data = Batches.load(DataSettings.load(**given))
        self.cursor = Cursor()
        self.policy = load_policy(self.settings, ranks)
        self.learner = Learner(self.settings, self.policy, ranks, None, self.settings.max_steps)
        self.critic = CriticLearner(self.learner) if self.settings.has_critic else None
        self.loaded = load(EngineSettings.load(**given))
        self.engine = Engine(self.loaded, on_failure=print)
        self.index = PriorityIndex()
        self.stored: list[Group] = []
        """All groups by sequence number."""
        self.position: dict[str, int] = {}
        """The position of each group in the index."""

    def train(self, curve: Curve) -> None:
        """Train for MAX_STEPS steps and write them to ``curve``."""
        self.engine.start()
        try:
            started = time.process_time()
            for step in range(self.settings.max_steps):
                self._step(step, curve)
            curve.seconds = time.process_time() - started
        finally:
            self.engine.stop()

    def _step(self, step: int, curve: Curve) -> None:
        """Take one step in the order of TrainingLoop.step; the policy's version is the number of steps before it."""
        fresh = self._make_groups(step)
        self._store(fresh)
        replayed = self._draw(step, fresh)
        kept = within_kl(replayed, self.learner.logprobs(replayed), self.settings.replay_max_kl) if replayed else []
        groups = [*(training_group(group, self.settings) for group in fresh), *kept]
        n_steps = self.settings.updates_per_batch
        if self.critic is None:
            groups = with_advantages(groups, self.settings)
        else:
            groups = with_critic_targets(groups, self.settings, self.critic.values(groups))
        self.learner.update(groups, step, n_steps=n_steps)
        if self.critic is not None and self.critic.trains_alone(step):
            self.critic.update(groups, step, n_steps=n_steps)
        for group in groups:
            self.index.set_priority(self.position[group.group_id], group.mean_absolute_advantage)
        state = gather_state(self.policy.full_parameters(published_dtype(self.settings)), self.ranks, copy=True)
        self.engine.change_weights(self.loaded.pack(state), str(step + 1), keeps_caches=False).result()
        curve.rewards.append(float(np.mean([group.rewards for group in fresh])))
        curve.replayed.append(len(kept))
        curve.left_out.append(len(replayed) - len(kept))

    def _make_groups(self, step: int) -> list[Group]:
        settings = self.settings
        prompts, self.cursor = self.data.batch(Split.TRAIN, self.cursor, settings.batch_size)
        requests = []
        for prompt in prompts:
            params = SamplingParams(
                n=settings.group_size,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                sampling_seed=derive_seed(settings.seed, prompt["epoch"], prompt["position"]),
            )
            requests.append(make_request(prompt["prompt_ids"], params, self.loaded))
            self.engine.submit(requests[-1])
        return [
            Group(
                group_id=f"{prompt['epoch']}-{prompt['position']}",
                prompt=prompt["prompt"],
                ground_truth=prompt["ground_truth"],
                prompt_ids=prompt["prompt_ids"],
                experiences=[self._score(sequence, prompt, step) for sequence in request.done.result().sequences],
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _score(self, sequence: Completion, prompt: Mapping[str, Any], version: int) -> Experience:
        text = self.loaded.decode_text(sequence.output_ids, True)
        assert sequence.finish is not None
        return Experience(
            completion=text,
            completion_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            policy_versions=[VersionSpan(version=version, start=0, end=len(sequence.output_ids))],
            finish_reason=FinishReason(sequence.finish["type"]),
            result=RewardResult(reward=self.reward(prompt["prompt"], prompt["ground_truth"], text)),
        )

    def _store(self, groups: Sequence[Group]) -> None:
        highest = self.index.highest_priority()
        for group in groups:
            self.position[group.group_id] = self.index.add(len(self.stored), group.policy_version, highest)
            self.stored.append(group)

    def _draw(self, step: int, fresh: Sequence[Group]) -> list[TrainingGroup]:
        settings = self.settings
        if settings.replay_groups == 0 or (step + 1) % settings.replay_every:
            return []
        draws = self.index.draw(
            settings.replay_groups,
            np.random.default_rng(derive_seed(settings.seed, "replay", step)),
            exponent=settings.replay_exponent,
            correction=settings.replay_correction,
            least_version=max(step - settings.replay_max_staleness, 0),
            exclude=[self.position[group.group_id] for group in fresh],
        )
        return [training_group(self.stored[d.sequence], settings, weight=d.weight, is_replayed=True) for d in draws]
