"""Waves: parts of a synchronous batch that are trained on while the engines generate the others.

A wave is a few neighbouring prompts of the batch. Once all of its groups are there, the ranks add its gradients, which
are not divided yet, because the denominators of the loss count the whole batch. After the last wave the optimizer takes
one step. The prompts' order alone decides which groups are a wave, and on processors also the order in which waves are
added, because sums of floating-point numbers depend on it: a run that is killed and resumed has the same weights to
the bit. On GPUs no update has the same bits twice, so any whole wave is next, and a long answer holds nobody up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.core.tasks import TIMELINE
from services.protocol.groups import Group
from trainer.algorithm.packing import TrainingGroup
from trainer.capacity.seconds import MEAN_PROMPT_TOKENS
from trainer.capacity.seconds import Batch as MeanBatch
from trainer.config import TrainerSettings
from trainer.rollouts.batch import Batch

LEAST_WAVES = 4
"""Waves into which a batch is divided at least, if it has as many prompts."""


def wave_size(settings: TrainerSettings, ranks: int) -> int:
    """Return the prompts of a wave: they fill about one micro-batch of each rank, and are a quarter of a batch at most.

    Args:
        settings: of the run.
        ranks: the ranks that compute, or their context groups.
    """
    mean = MeanBatch.of(settings)
    group_tokens = MEAN_PROMPT_TOKENS + mean.group_size * mean.completion_tokens
    full = ranks * max(1, int(settings.context_parallel_size * settings.micro_batch_tokens / group_tokens))
    return max(1, min(full, settings.batch_size // LEAST_WAVES))


class Waves:
    """The waves of one batch. Groups arrive in another thread than that which trains."""

    def __init__(
        self, batch: Batch, size: int, add: Callable[[Sequence[TrainingGroup]], None], *, is_in_order: bool
    ) -> None:
        """Divide a batch into waves of ``size`` prompts; ``add`` adds the gradients of one wave's groups.

        With ``is_in_order`` a wave waits for those before it.
        """
        self._batch, self._size, self._add, self._is_in_order = batch, size, add, is_in_order
        self._waves: list[range] = []
        """The places of each wave's prompts in the batch."""
        self._added: set[range] = set()
        self._arrived: dict[int, Group | None] = {}
        """The group of each place that is done; None for a prompt that was left out."""
        self._first = 0
        """The place of the first prompt that was fetched last."""
        self._last_arrival = 0.0
        self._spans: list[tuple[float, float]] = []
        self.overlap_seconds = 0.0
        """The time of training in which other groups were still generated or scored."""

    def begin(self, prompts: int) -> None:
        """Divide the next ``prompts`` prompts, whose groups will be made now, into waves."""
        self._first = len(self._arrived)
        end = self._first + prompts
        self._waves += [range(n, min(n + self._size, end)) for n in range(self._first, end, self._size)]

    def arrive(self, place: int, group: Group | None) -> None:
        """Take in what was made of a prompt, by its place among those of ``begin``."""
        self._last_arrival = time.perf_counter()
        self._arrived[self._first + place] = group

    def train(self) -> None:
        """Train on the next wave whose groups are all there, if there is one."""
        waiting = [wave for wave in self._waves if wave not in self._added]
        for wave in waiting[: 1 if self._is_in_order else None]:
            if all(place in self._arrived for place in wave):
                started = time.perf_counter()
                groups = self._batch.prepared(self._groups(wave))
                self._train(wave, self._batch.objective.with_advantages(groups))
                self._spans.append((started, time.perf_counter()))
                TIMELINE.add("waves", "train", *self._spans[-1])
                return

    def end(self) -> float:
        """Account for the training since ``begin``; return the seconds since the last group arrived."""
        last = self._last_arrival
        self.overlap_seconds += sum(max(0.0, min(end, last) - start) for start, end in self._spans)
        self._spans.clear()
        return time.perf_counter() - last

    def finish(self, groups: Sequence[TrainingGroup]) -> None:
        """Train on the waves that are left, and on replayed groups, which come after the batch's own in ``groups``."""
        first = 0
        for wave in self._waves:
            size = len(self._groups(wave))
            if wave not in self._added:
                self._train(wave, groups[first : first + size])
            first += size
        if groups[first:]:
            self._add(groups[first:])

    def sizes(self, groups: Sequence[TrainingGroup]) -> list[int]:
        """Return the numbers of groups of the waves, in the order of ``groups``, those of the whole step."""
        own = [size for wave in self._waves if (size := len(self._groups(wave)))]
        replayed = len(groups) - sum(own)
        return [*own, replayed] if replayed else own

    def _groups(self, wave: range) -> list[Group]:
        made = (self._arrived[place] for place in wave)
        return [group for group in made if group is not None and self._batch.is_counted(group)]

    def _train(self, wave: range, groups: Sequence[TrainingGroup]) -> None:
        self._added.add(wave)
        if groups:
            self._add(groups)
