"""Groups reach the other ranks as they are on rank 0, to the bit, and their numbers are not sent as text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson

from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import random_groups, random_trees
from trainer.algorithm.packing import TrainingGroup, TrainingSequence, Turn
from trainer.group_arrays import from_arrays, to_arrays

ODD = TrainingGroup(
    [7],
    [
        TrainingSequence([], [], []),
        TrainingSequence(
            completion_ids=[3, 2**40],
            behaviour_logprobs=[-math.inf, -1e-30],
            advantages=[1 / 3, 5e-324],
            loss_mask=[False, True],
            reward=0.1,
            has_own_advantages=True,
            values=[0.1, 0.2],
            returns=[1.0, 2.0],
            episode=3,
            turns=[Turn(0, 0, 1, 0.5), Turn(1, 1, 2, -1.0)],
            seat=1,
        ),
    ],
    group_id="größe",
    weight=0.7,
    is_replayed=True,
)
GROUPS = [*random_groups(0), *random_trees(1), ODD, replace(ODD, sequences=[], group_id="")]


def test_groups_survive_the_arrays_to_the_bit() -> None:
    header, arrays = to_arrays(GROUPS)
    received = from_arrays(orjson.loads(orjson.dumps(header)), arrays)
    assert received == GROUPS
    assert [type(x) for x in received[0].sequences[0].completion_ids] == [int] * len(
        GROUPS[0].sequences[0].completion_ids
    )
    assert from_arrays(*to_arrays([])) == []


def test_the_numbers_of_tokens_are_no_json() -> None:
    long: Any = [TrainingGroup([1] * 1000, [TrainingSequence([5] * 1000, [-1.0] * 1000, [0.5] * 1000)])]
    header, arrays = to_arrays(long)
    assert len(orjson.dumps(header)) < 1000
    assert sum(array.nbytes for array in arrays) == 1000 * (8 + 8 + 8 + 8)


def test_every_rank_hears_the_groups_of_rank_0() -> None:
    first, second = run_on_ranks(2, rank_jobs.hear_groups, GROUPS)
    assert first == second == [GROUPS, []]
