"""Conversations in the engine: a later turn computes new tokens only, with the results of one computed from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.embedded_engine import scheduler
from services.embedded_engine.scheduler import Request
from tests.services.embedded_engine.conftest import PROMPT, RunningEngine
from tests.services.embedded_engine.test_engine import MakeEngine, held, other_weights, outputs
from tests.tolerance import both_types
from tests.waiting import IDLE_SECONDS

__all__ = ["other_weights"]

SUFFIXES = ([7, 3, 9], [4] * 40, [8, 2], [6] * 90)


def computed(engine: RunningEngine) -> int:
    """The prompt tokens that the engine computed."""
    return int(engine.engine.stats()["prompt_tokens"])


def play(engine: RunningEngine, *, flushes: bool = False, **fields: Any) -> list[Request]:
    """A conversation of several turns, each with tokens of its own after the completion before."""
    turns, prompt = [], list(PROMPT)
    for turn, suffix in enumerate(SUFFIXES):
        if flushes:
            engine.engine.flush().result(IDLE_SECONDS)
        turns.append(engine.generate(prompt, sampling_seed=turn, max_new_tokens=45, **fields))
        prompt = [*prompt, *turns[-1].sequences[0].output_ids, *suffix]
    return turns


@both_types
def test_a_turn_computes_new_tokens_only_and_gives_what_it_gives_without_a_cache(engine: RunningEngine) -> None:
    without = play(engine, flushes=True)
    assert [turn.sequences[0].cached_tokens for turn in without] == [0] * 4
    engine.engine.flush().result(IDLE_SECONDS)
    before = computed(engine)
    # They begin with other tokens than the conversation.
    others = [engine.submit([7 + i] * (5 + i), n=2, max_new_tokens=60) for i in range(5)]
    busy = sum(len(range(5 + i)) for i in range(5))
    turns = play(engine)
    assert [outputs(turn) for turn in turns] == [outputs(turn) for turn in without]
    # The newest token of a completion is sampled, but not computed.
    lengths = [len(turn.prompt_ids) + 44 for turn in turns]
    assert [turn.sequences[0].cached_tokens for turn in turns] == [0, *lengths[:-1]]
    for other in others:
        other.result(IDLE_SECONDS)
    assert computed(engine) - before == busy + len(PROMPT) + sum(len(suffix) + 1 for suffix in SUFFIXES[:-1])


def test_requests_of_the_same_prompt_at_once_compute_it_once(engine: RunningEngine) -> None:
    prompt = [2 + place * place % 13 for place in range(50)]
    gate, first = held(engine)
    together = [engine.submit(prompt, sampling_seed=i) for i in range(4)]
    before = computed(engine)
    gate.released.set()
    first.result(IDLE_SECONDS)
    cached = [done.result(IDLE_SECONDS).sequences[0].cached_tokens for done in together]
    assert cached == [0, 49, 49, 49]
    assert computed(engine) - before == 50 + 3


def test_a_group_leaves_its_prompt_but_not_its_completions(engine: RunningEngine) -> None:
    group = engine.generate(n=3, max_new_tokens=20)
    again = engine.generate([*PROMPT, *group.sequences[0].output_ids])
    assert again.sequences[0].cached_tokens == len(PROMPT)
    # A completion is kept at the end of the step that ends it.
    engine.engine.change_version("0").result(IDLE_SECONDS)
    assert engine.engine.stats()["prefix_cache_tokens"] == len(PROMPT) + 20 + 7


def test_a_group_of_long_pieces_is_continued_from_its_tokens(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LONG_TOKENS", 40)
    group = engine.generate(n=3, max_new_tokens=40, sampling_seed=1)
    before = computed(engine)
    for sequence in group.sequences:
        engine.generate(PROMPT + sequence.output_ids, max_new_tokens=4)
    assert computed(engine) - before == 3


def test_kept_tokens_are_bounded(make_engine: MakeEngine) -> None:
    small = make_engine(engine_max_total_tokens=512)
    for first in range(2, 12):
        small.generate([first] * 60, max_new_tokens=40)
        assert small.engine.stats()["prefix_cache_tokens"] <= 256
    assert small.generate([11] * 60).sequences[0].cached_tokens == 59
    assert small.generate([2] * 60).sequences[0].cached_tokens == 0


def test_prompt_logprobs_are_computed_past_the_cache(engine: RunningEngine) -> None:
    prompt = [2 + place * place % 13 for place in range(40)]
    wanted = engine.generate(prompt, logprob_start=0, max_new_tokens=0).input_logprobs
    engine.generate(prompt)
    again = engine.generate(prompt, logprob_start=0, max_new_tokens=1)
    assert again.input_logprobs == wanted
    assert again.sequences[0].cached_tokens == 0


@both_types
def test_new_weights_drop_all_that_the_old_ones_computed(
    engine: RunningEngine, other_weights: dict[str, torch.Tensor]
) -> None:
    [sequence] = engine.generate(max_new_tokens=20).sequences
    weights = engine.loaded.pack(dict(other_weights))
    engine.engine.change_weights(weights, "7").result(IDLE_SECONDS)
    following = engine.generate([*PROMPT, *sequence.output_ids, 3], sampling_seed=1)
    assert following.sequences[0].cached_tokens == 0
    assert following.sequences[0].versions == [("7", 0)]
    third = [*PROMPT, *sequence.output_ids, 3, *following.sequences[0].output_ids, 4]
    assert engine.generate(third).sequences[0].cached_tokens == len(third) - 2
    engine.engine.change_weights(weights, "8").result(IDLE_SECONDS)
    again = engine.generate(following.prompt_ids, sampling_seed=1)
    assert again.sequences[0].cached_tokens == 0
    assert outputs(again) == outputs(following)
