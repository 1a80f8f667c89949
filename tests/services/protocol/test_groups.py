"""Sequences and groups: what is refused, and the bytes that carry them, from which they come back to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.protocol.groups import (
    Group,
    GroupFormatError,
    TokenSequence,
    pack,
    pack_sequences,
    unpack,
    unpack_sequences,
)
from services.protocol.rewards import FinishReason
from tests.sequences import changed, make_group, trained_sequence

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
result = st.one_of(
    st.builds(lambda reward, reason: {"reward": reward, "reason": reason, "components": {"a": reward}}, numbers, text),
    st.builds(lambda value: {"reward": None, "status": "timeout", "components": {"a": None, "b": value}}, numbers),
)


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 6))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    return {
        "completion": draw(text),
        "completion_ids": each(ids),
        "logprobs": each(st.floats(max_value=0, allow_nan=False, allow_infinity=False)),
        "policy_versions": each(st.integers(0, 4)),
        "finish_reason": draw(st.sampled_from(FinishReason)),
        "result": draw(result),
        "loss_mask": draw(st.none() | st.just(each(st.booleans()))),
        "advantages": draw(st.none() | st.just(each(numbers))),
        "arrays": draw(st.just({}) | st.just({"reference": each(numbers), "teacher": each(numbers)})),
        "turns": draw(st.none() | st.just([{"number": 1, "start": 0, "end": n, "reward": 0.5, "call": 2}]))
        if n
        else None,
    }


@st.composite
def groups(draw: st.DrawFn) -> Group:
    drawn = draw(st.lists(sequences(), min_size=1, max_size=3))
    fields: dict[str, Any] = {}
    for place, sequence in enumerate(drawn):
        if place % 2:
            messages = [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}], "sampled": True}]
            sequence |= {"episode": place, "seat": 1, "messages": messages}
            fields = {
                "episode_figures": {place: {"turns": 2, "figures": {"legal_moves": 0.5}}},
                "episodes_failed": {"timeout": 1},
                "failure_examples": {"timeout": draw(text)},
            }
    return make_group(
        group_id=draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)),
        id=draw(text),
        prompt=draw(text),
        prompt_ids=draw(st.lists(ids, min_size=1, max_size=5)),
        row=draw(text).encode(),
        source=draw(text),
        epoch=draw(st.integers(0, 100)),
        sequences=drawn,
        **fields,
    )


@given(groups())
def test_every_group_comes_back_as_it_was(group: Group) -> None:
    assert unpack(pack(group)) == group
    assert Group.model_validate_json(group.model_dump_json()) == group


def test_numbers_come_back_to_the_bit() -> None:
    odd = changed(trained_sequence([1, 2, 3], [-0.1, -0.0, -1e300]), advantages=[-0.0, 5e-324, 1 / 3], reward=-0.0)
    [group] = [make_group(sequences=[odd])]
    [sequence] = unpack(pack(group)).sequences
    assert sequence.logprobs.tobytes() == odd.logprobs.tobytes()
    assert sequence.advantages is not None
    assert sequence.advantages.tobytes() == np.array([-0.0, 5e-324, 1 / 3]).tobytes()
    assert str(sequence.reward) == "-0.0"
    assert odd != changed(odd, advantages=[0.0, 5e-324, 1 / 3])
    unknown = changed(odd, advantages=[math.nan] * 3)
    _, [fields] = unpack_sequences(pack_sequences({}, [unknown]))
    assert TokenSequence.trusted(fields) == unknown


def test_logprobs_of_float32_take_four_bytes_and_constants_take_none() -> None:
    rng = np.random.default_rng(0)
    short, long = (-rng.exponential(size=1000)).astype(np.float32).astype(float), -rng.exponential(size=1000)
    for logprobs, size in ((short, 8000), (long, 12_000)):
        mask = [True] * 1000
        group = make_group(sequences=[trained_sequence([*range(1000)], logprobs, loss_mask=mask)])
        assert size < len(pack(group)) < size + 600
        assert unpack(pack(group)) == group


def test_another_format_and_damaged_bytes_are_refused() -> None:
    data = pack(make_group(sequences=[trained_sequence([1, 2], [-1.0, -2.0])]))
    with pytest.raises(GroupFormatError, match="format 1; this program reads format 3, so begin a new run"):
        unpack(b"\x01" + data[1:])
    with pytest.raises(GroupFormatError, match="damaged"):
        unpack(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(GroupFormatError, match="no bytes"):
        unpack(b"")


def test_sequences_that_are_not_whole_are_refused_by_the_fields_name() -> None:
    whole = trained_sequence([3, 4], [-1.0, -1.0]).model_dump()
    TokenSequence.model_validate(whole)
    short = [("logprobs", [[], [-1.0], [-1.0] * 3]), ("loss_mask", [[True]]), ("arrays", [{"teacher": [0.5]}])]
    for name, values in short:
        for value in values:
            with pytest.raises(
                ValidationError, match=f"2 completion_ids but .*{'teacher' if name == 'arrays' else name}"
            ):
                TokenSequence.model_validate(whole | {name: value})
    for name in ("completion_ids", "policy_versions", "logprobs", "loss_mask"):
        for value in (["a", 1], [[1], [2]], [None, None], "ab", {"0": 1}, [math.nan, 0.0], 3):
            with pytest.raises(ValidationError) as refusal:
                TokenSequence.model_validate(whole | {name: value})
            assert refusal.value.errors()[0]["loc"][0] == name, value


def test_a_group_needs_prompt_ids_results_and_one_reward_an_episode() -> None:
    one = trained_sequence([1], [-1.0], reward=1.0, episode=3)
    other = trained_sequence([1], [-1.0], reward=0.0, episode=3)
    for fields, reason in [
        ({"sequences": [one], "prompt_ids": []}, "prompt_ids is empty"),
        ({"sequences": [one.model_copy(update={"result": None})]}, "has no result"),
        ({"sequences": [one, other]}, "episode 3 have different rewards"),
    ]:
        with pytest.raises(ValidationError, match=reason):
            make_group(**fields)
