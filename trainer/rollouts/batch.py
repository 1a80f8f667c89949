"""The groups of one step, as they come together."""

from __future__ import annotations

from collections.abc import Sequence

from services.protocol.groups import Group
from services.protocol.replay import SampledGroup
from trainer.algorithm.packing import TrainingGroup
from trainer.config.objective import Objective


class Batch:
    """The groups of one step: BATCH_SIZE of them, fewer when prompts were left out or are used up.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups without a signal give way to those of further
    prompts: DYNAMIC_SAMPLING_TRIES times at most, or so many batches of groups from the queue.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective, settings = objective, objective.settings
        self.settings = settings
        self.groups: list[Group] = []
        """The groups to train on."""
        self.scored: list[Group] = []
        """All groups made for the step, those without a signal included."""
        self._prepared: dict[int, TrainingGroup] = {}
        """Groups made for the step as the loss sees them, before their advantages are known, by ``id``."""
        self.prompts_used = 0
        """Prompts of the step, those that got no group and those of groups that were too stale included."""
        self.replayed: list[SampledGroup] = []
        """The groups drawn from the replay buffer."""
        self.trained: list[TrainingGroup] = []
        """The groups, fresh and replayed, with their advantages, as the loss sees them."""
        self.counts: dict[str, float] = {}
        """Counts and other figures by metric name."""
        self.seconds_scoring = 0.0
        """Seconds of the newest ``generate_and_score`` after its last completion was generated."""
        self._tries_left = settings.dynamic_sampling_tries
        self._is_closed = False

    @property
    def missing(self) -> int:
        """The number of prompts to fetch next."""
        return 0 if self._is_closed else self.settings.batch_size - len(self.groups)

    def add(self, made: Sequence[Group]) -> None:
        """Take in the groups of the prompts that were fetched last; none if all of them were left out."""
        if not made:
            return
        self._is_closed = self._tries_left == 0
        kept = [group for group in made if self._is_closed or self._has_signal(group)]
        self._tries_left -= 1
        self.scored += made
        self.groups += kept
        self.counts["groups_resampled"] = self.counts.get("groups_resampled", 0.0) + len(made) - len(kept)

    def take(self, leased: Sequence[Group]) -> list[Group]:
        """Take in groups from the queue of fresh groups, and return those that are kept."""
        kept = []
        for group in leased:
            dropped = self.counts.get("groups_resampled", 0.0)
            most = self.settings.dynamic_sampling_tries * self.settings.batch_size
            if dropped < most and not self._has_signal(group):
                self.counts["groups_resampled"] = dropped + 1
            else:
                kept.append(group)
        self.scored += leased
        self.groups += kept
        return kept

    def prepared(self, groups: Sequence[Group]) -> list[TrainingGroup]:
        """Return groups of the step as the loss sees them, before their advantages are known; each is made once."""
        for group in groups:
            if id(group) not in self._prepared:
                self._prepared[id(group)] = self.objective.training_group(group)
        return [self._prepared[id(group)] for group in groups]

    def _has_signal(self, group: Group) -> bool:
        return self.objective.has_signal(*self.prepared([group]))
