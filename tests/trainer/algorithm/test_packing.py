"""Groups are packed without losing, doubling or mixing anything."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from services.protocol.groups import Turn
from tests.sequences import changed, trained_sequence
from tests.trainer import rank_jobs
from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes, prefixes
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import random_groups, random_trees
from trainer.algorithm.packing import MicroBatch, TrainingGroup, pack, pack_group, unpack_group


def in_order(batch: MicroBatch) -> list[list[int]]:
    """Return the completion tokens of each completion."""
    return [batch.targets[batch.sequence_ids == s].tolist() for s in range(batch.n_sequences)]


@fast
@given(groups=groups_of_many_shapes())
def test_a_packed_token_is_predicted_from_the_one_before_it_in_its_own_completion(groups: list[TrainingGroup]) -> None:
    groups = [g for g in groups if g.sequences]
    if not groups:
        return
    batch = pack(groups)
    rows = [(group, sequence) for group in groups for sequence in group.sequences]
    assert in_order(batch) == [sequence.trained(sequence.completion_ids).tolist() for _, sequence in rows]
    assert len(batch.input_ids) == sum(group.tokens for group in groups), "no padding"
    assert len(batch.predict_rows.unique()) == len(batch.predict_rows)
    read = iter(batch.input_ids[batch.predict_rows[batch.state_ids]].tolist())
    for group, sequence in rows:
        context = [*group.prompt_ids, *sequence.completion_ids.tolist()]
        before = sequence.trained(np.array(context[len(group.prompt_ids) - 1 : -1])).tolist()
        assert [next(read) for _ in before] == before
    logprobs = [x for _, s in rows for x in s.trained(s.logprobs).tolist()]
    assert batch.behaviour_logprobs.tolist() == pytest.approx(logprobs)
    advantages = [x for _, s in rows for x in s.trained(s.per_token.get("advantages", np.zeros(s.tokens))).tolist()]
    assert batch.advantages.tolist() == pytest.approx(advantages)
    assert batch.weights.tolist() == [g.weight for g, s in rows for _ in range(s.trained_tokens)]
    assert batch.is_replayed.tolist() == [g.is_replayed for g, s in rows for _ in range(s.trained_tokens)]


def test_a_group_of_episodes_costs_its_distinct_tokens() -> None:
    """Eight episodes of four turns; every call is a sequence that begins with the turns before it."""
    prompt, turns, episodes, sampled, result = 300, 4, 8, 20, 15
    token = iter(range(1_000_000))
    ids = [next(token) for _ in range(prompt)]
    sequences = []
    for _ in range(episodes):
        history: list[int] = []
        for _ in range(turns):
            own = [next(token) for _ in range(sampled)]
            n = len(history)
            mask = [False] * n + [True] * sampled
            sequences.append(trained_sequence(history + own, [0.0] * len(mask), [1.0] * len(mask), mask))
            history = history + own + [next(token) for _ in range(result)]
    batch = pack([TrainingGroup(ids, sequences)])
    # The last token of an episode predicts nothing.
    assert len(batch.input_ids) == prompt + episodes * (turns * sampled + (turns - 1) * result - 1)
    assert len(batch.targets) == episodes * turns * sampled
    assert len(batch.predict_rows) == len(batch.targets) - (episodes - 1), "one state predicts all first tokens"


@fast
@given(groups=groups_of_many_shapes())
def test_equal_prefixes_are_one_and_the_order_of_completions_does_not_matter(groups: list[TrainingGroup]) -> None:
    for group in groups:
        assert group.tokens == len(prefixes(group))
        turned = replace(group, sequences=group.sequences[::-1])
        assert turned.tokens == group.tokens
        if group.sequences:
            assert torch.equal(pack([turned]).input_ids, pack([group]).input_ids)


def test_a_rank_with_nothing_left_computes_a_filler_that_weighs_nothing() -> None:
    batch = pack([])
    assert batch.is_filler
    assert batch.advantages.abs().sum() + batch.weights.abs().sum() == 0
    assert not pack([TrainingGroup([1], [trained_sequence([2], [0.0], [1.0])])]).is_filler


def test_a_group_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="'g7' has no prompt_ids"):
        TrainingGroup([], [], "g7")


ODD = TrainingGroup(
    [7],
    [
        trained_sequence([], []),
        changed(
            trained_sequence([3, 2**31 - 1], [-1.0, -1e-30], [1 / 3, 5e-324], [False, True], 0.1),
            logprobs=[-math.inf, math.nan],
            values=[0.1, -0.0],
            returns=[1.0, math.nan],
            episode=3,
            turns=[Turn(number=0, start=0, end=1, reward=0.5), Turn(number=1, start=1, end=2, reward=-0.0)],
            seat=1,
        ),
    ],
    group_id="größe",
    weight=0.7,
    is_replayed=True,
)
GROUPS = [*random_groups(0), *random_trees(1), ODD, replace(ODD, sequences=[], group_id="")]


def test_a_group_reaches_other_ranks_to_the_bit_whatever_was_computed_of_it() -> None:
    for group in GROUPS:
        assert group.tokens >= 0
        received = unpack_group(pack_group(group))
        assert received == group
        assert pack_group(received) == pack_group(group)
    values = unpack_group(pack_group(ODD)).sequences[1].arrays["values"]
    assert math.copysign(1, values[1]) == -1


def test_every_rank_hears_the_groups_of_rank_0() -> None:
    first, second = run_on_ranks(2, rank_jobs.hear_groups, GROUPS)
    assert first == second == [GROUPS, []]


def test_a_priority_is_of_trained_tokens_only() -> None:
    """Tokens that are read only may have an advantage: an episode's is that of all of its sequences' tokens."""
    sequence = trained_sequence([3, 4, 5], [-1.0] * 3, [0.5, 9.0, -1.0], [True, False, True])
    assert TrainingGroup([1, 2], [sequence]).mean_absolute_advantage == 0.75


def lines_to_pack(longest: int) -> int:
    """Return how many lines of the trainer run to pack random groups."""
    groups = random_groups(0, longest=longest, vocabulary=10**6)
    lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal lines
        lines += event == "line"
        return count if "/trainer/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        pack(groups)
    finally:
        sys.settrace(before)
    return lines


def test_packing_runs_nothing_in_python_for_each_token() -> None:
    assert lines_to_pack(longest=4000) < 1.1 * lines_to_pack(longest=40)
