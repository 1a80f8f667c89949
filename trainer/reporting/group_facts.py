"""Facts about the groups of a step: sums that metrics.jsonl keeps, for services/run_page/rules.py to judge.

They need the groups, which RECORD_GROUPS may not keep, and so they are counted where the step is recorded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, combinations, zip_longest
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.protocol.groups import Group, TokenSequence, by_episode
from services.protocol.rewards import FinishReason
from services.run_page.diagnosis import question_key
from trainer.algorithm.methods import GROUP_ADVANTAGES, Credit
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings

MOST_EXAMPLES = 3
"""Groups that a fact names in a step."""
COPY_CHANCE = 1e-4
"""Equal completions are copies of each other if they had a smaller chance to be equal."""
READING = {"math", "exact_match", "reasoning_gym", "code"}
"""The rewards that read an answer out of a completion, and say which."""

Sums = Iterator[tuple[str, list[float], bool]]
"""The facts of a group: name, numbers to add to the step's, and whether the group is an example of the fault."""


class GroupFacts:
    """The facts about the groups of each step of a run."""

    def __init__(self, settings: TrainerSettings, special: Collection[int] = (), ends: Collection[int] = ()) -> None:
        """``special`` are the tokenizer's special tokens, and ``ends`` those of them that end a text."""
        self._special, self._ends = np.array([*special], np.int64), np.array([*ends], np.int64)
        self._compares = settings.advantage in GROUP_ADVANTAGES and settings.credit is Credit.EPISODE
        self._compares &= not settings.kl_in_reward and settings.learns_from_rewards
        self._needs_signal = not settings.learns_beyond_advantages

    def of_step(self, groups: Sequence[Group], trained: Sequence[TrainingGroup] = ()) -> dict[str, Any]:
        """Return sums by name; ``prompts``, each [epoch, position, key, source]; and ``examples`` of faults by name.

        Args:
            groups: the groups that were made.
            trained: the groups as the loss saw them.
        """
        sums: dict[str, list[float]] = {}
        examples: defaultdict[str, dict[str, None]] = defaultdict(dict)
        fresh = {group.group_id: group for group in trained if not group.is_replayed}
        for group in groups:
            of_loss = self._of_training(fresh[group.group_id]) if group.group_id in fresh else ()
            for name, numbers, is_example in chain(self._of_group(group), of_loss):
                sums[name] = [float(a + b) for a, b in zip_longest(sums.get(name, ()), numbers, fillvalue=0.0)]
                if is_example:
                    examples[name][group.group_id] = None
        prompts = [(group.prompt.epoch, group.prompt.position, group.prompt) for group in groups]
        return {
            **{name: [float(f"{number:.6g}") for number in numbers] for name, numbers in sums.items()},
            "prompts": [[epoch, at, question_key(p.prompt, p.ground_truth), p.source] for epoch, at, p in prompts],
            "examples": {name: [*names][:MOST_EXAMPLES] for name, names in examples.items()},
        }

    def _of_group(self, group: Group) -> Sums:
        """Yield the facts about a group as it was made."""
        ids = np.array(group.prompt_ids)
        is_doubled = len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._special
        is_broken = bool(is_doubled or (ids[-1] in self._ends))
        yield "prompt", [1.0, is_broken], is_broken
        for sequences in group.episodes:
            yield from self._of_tokens(sequences)
        scored = [episode for episode in group.episodes if episode[0].reward is not None]
        read = [first.scoring for first, *_ in scored if READING & first.scoring.components.keys()]
        unread = sum(result.extracted is None for result in read)
        yield "read", [len(read), unread], bool(unread)
        yield from _tools(group)
        if len(scored) < 2 or any(first.seat is not None for first, *_ in scored):
            return
        rewards = np.array([first.reward for first, *_ in scored], float)
        yield from _copies(scored, rewards)
        if correlation := _correlation(rewards, [sum(s.trained_tokens for s in sequences) for sequences in scored]):
            yield "length", correlation, False
        if rewards.std() > 0:
            # A constant part of the reward at one place in the group is that place's mean over many groups.
            yield "place", [1.0, *((rewards - rewards.mean()) / rewards.std())], False

    def _of_tokens(self, sequences: Sequence[TokenSequence]) -> Sums:
        """Yield the facts about an episode's tokens."""
        for sequence in sequences:
            sampled = sequence.completion_ids[sequence.mask]
            if not len(sampled) or not len(self._special):
                continue
            stopped = sequence.finish_reason is FinishReason.STOP and bool(sequence.mask[-1])
            lacks_end = stopped and sampled[-1] not in self._special
            yield "ends", [float(stopped), float(lacks_end)], bool(lacks_end)
            # A turn ends where a token that was not sampled follows.
            is_last = np.append(~sequence.mask[1:], True)[sequence.mask]
            odd = int((np.isin(sampled, self._special) & ~is_last).sum())
            yield "special", [len(sampled), odd], odd > 0

    def _of_training(self, group: TrainingGroup) -> Sums:
        """Yield the facts about a fresh group as the loss sees it."""
        if self._needs_signal and not group.mean_absolute_advantage:
            return
        behaviour = np.concatenate([s.trained(s.logprobs) for s in group.sequences])
        yield "surprise", [len(behaviour), -behaviour.sum(), (behaviour**2).sum()], False
        episodes = by_episode(group.sequences)
        if not self._compares or any(s.seat is not None or s.advantages is None for s in group.sequences):
            return
        rewards = np.array([first.reward for first, *_ in episodes], float)
        advantages = (np.concatenate([s.trained(s.advantages) for s in e]) for e in episodes)  # type: ignore[arg-type]
        if correlation := _correlation(rewards, [fmean(each.tolist() or [0.0]) for each in advantages]):
            yield "advantage", correlation, correlation[1] < 0


def _copies(episodes: Sequence[Sequence[TokenSequence]], rewards: NDArray[np.float64]) -> Sums:
    """Yield whether all answers are copies, and the pairs of equal answers, of which some have unequal rewards."""
    answers = [b"".join(s.completion_ids.tobytes() + s.finish_reason.encode() for s in e) for e in episodes]
    logprob = sum(float(s.trained(s.logprobs).sum()) for s in episodes[0])
    are_copies = len(set(answers)) == 1 and (len(answers) - 1) * logprob < math.log(COPY_CHANCE)
    yield "copies", [1.0, float(are_copies), len(set(answers)) > 1 and rewards.std() == 0], are_copies
    pairs = [(i, j) for i, j in combinations(range(len(answers)), 2) if answers[i] == answers[j]]
    unequal = sum(not math.isclose(rewards[i], rewards[j], rel_tol=1e-6, abs_tol=1e-9) for i, j in pairs)
    yield "equal", [len(pairs), unequal], unequal > 0


def _tools(group: Group) -> Sums:
    """Yield [episodes, calls, calls that cannot be read], then [episodes, sum of rewards] without and with a call."""
    figures = group.episode_figures or {}
    for first, *_ in group.episodes:
        of = figures.get(-1 if first.episode is None else first.episode)
        if of is None or not of.tools_offered:
            continue
        scored = [1.0, first.reward] if first.reward is not None else [0.0, 0.0]
        with_and_without = [0.0, 0.0, *scored] if of.tool_calls else [*scored, 0.0, 0.0]
        calls = [1.0, of.tool_calls, of.unparsed_tool_calls]
        yield "tools", [*calls, *with_and_without], not of.tool_calls


def _correlation(rewards: NDArray[np.float64], others: Sequence[float]) -> list[float]:
    """Return 1 and the correlation of answers' rewards with other numbers; nothing if either are all equal."""
    if rewards.std() > 0 and np.std(others) > 0:
        return [1.0, float(np.corrcoef(rewards, others)[0, 1])]
    return []
