from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.groups import Group
from services.replay_buffer.packing import pack, unpack

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.integers(0, 2**31 - 1)
logprob = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
result = st.one_of(
    st.builds(
        lambda reward, reason: {"reward": reward, "reason": reason, "components": {"math": reward}},
        st.floats(allow_nan=False, allow_infinity=False),
        text,
    ),
    st.just({"reward": None, "status": "timeout"}),
)


@st.composite
def experiences(draw: st.DrawFn) -> dict[str, object]:
    tokens = draw(st.integers(0, 6))
    cut = draw(st.integers(0, tokens))
    return {
        "completion": draw(text),
        "completion_ids": draw(st.lists(ids, min_size=tokens, max_size=tokens)),
        "logprobs": draw(st.lists(logprob, min_size=tokens, max_size=tokens)),
        "policy_versions": [
            {"version": 3, "start": 0, "end": cut},
            {"version": 4, "start": cut, "end": tokens},
        ],
        "finish_reason": draw(st.sampled_from(["stop", "length", "abort"])),
        "result": draw(result),
        "loss_mask": draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens)),
        "advantages": draw(st.none() | st.lists(st.floats(-9, 9), min_size=tokens, max_size=tokens)),
    }


def group_of(**fields: Any) -> Group:
    """Return a group in which every other experience has the number of an episode."""
    for place, experience in enumerate(fields["experiences"]):
        experience["episode"] = place if place % 2 else None
        if place % 2:
            experience["messages"] = [{"role": "assistant", "tool_calls": [{"name": "add"}], "sampled": True}]
            tokens = len(experience["completion_ids"])
            experience["seat"] = place % 2
            experience["turns"] = [{"number": 1, "start": 0, "end": tokens, "reward": 0.5}] if tokens else None
            fields |= {
                "episode_figures": {place: {"turns": 2, "figures": {"legal_moves": 0.5}}},
                "episodes_failed": {"timeout": 1},
                "failure_examples": {"timeout": "the agent took more than 9 s"},
            }
    return Group.model_validate(fields)


groups = st.builds(
    group_of,
    group_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    prompt_id=text,
    prompt=text,
    ground_truth=text,
    prompt_ids=st.lists(ids, min_size=1, max_size=5),
    experiences=st.lists(experiences(), min_size=1, max_size=3),
    epoch=st.integers(0, 100),
    position=st.integers(0, 100),
)


@given(groups)
def test_every_group_comes_back_as_it_was(group: Group) -> None:
    assert Group.model_validate_json(orjson.dumps(unpack(pack(group)), option=orjson.OPT_SERIALIZE_NUMPY)) == group


def test_logprobs_of_float32_take_four_bytes_and_stay_exact() -> None:
    def make(logprobs: list[float]) -> Group:
        experience = {
            "completion_ids": [1] * 1000,
            "logprobs": logprobs,
            "policy_versions": [{"version": 0, "start": 0, "end": 1000}],
            "finish_reason": "stop",
            "result": {"reward": 0.0},
        }
        return Group(group_id="g", prompt="p", ground_truth="", prompt_ids=[1], experiences=[experience])

    rng = np.random.default_rng(0)
    short = (-rng.exponential(size=1000)).astype(np.float32).astype(float).tolist()
    assert len(pack(make(short))) < 8 * 1000 + 500
    assert unpack(pack(make(short)))["experiences"][0]["logprobs"].tolist() == short
    long = (-rng.exponential(size=1000)).tolist()
    assert unpack(pack(make(long)))["experiences"][0]["logprobs"].tolist() == long


def test_another_format_is_refused_and_not_misread() -> None:
    group = Group.model_validate(
        {
            "group_id": "g",
            "prompt": "",
            "ground_truth": "",
            "prompt_ids": [1],
            "experiences": [
                {
                    "completion_ids": [],
                    "logprobs": [],
                    "policy_versions": [{"version": 0, "start": 0, "end": 0}],
                    "finish_reason": "abort",
                    "result": {"reward": 0.0},
                }
            ],
        }
    )
    with pytest.raises(ValueError, match="format 9; this program reads 1"):
        unpack(b"\x09" + pack(group)[1:])
