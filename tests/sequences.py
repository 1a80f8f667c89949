"""Sequences of tokens for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult

ARRAYS = {
    "completion_ids": np.int32,
    "policy_versions": np.int32,
    "logprobs": np.float64,
    "advantages": np.float64,
    "loss_mask": np.bool_,
}


def trained_sequence(
    completion_ids: Sequence[int],
    logprobs: Sequence[float],
    advantages: Sequence[float] = (),
    loss_mask: Sequence[bool] | None = None,
    reward: float = 0.0,
    **fields: Any,
) -> TokenSequence:
    """Return a scored sequence; without an ``advantages`` that is not 0, it has none of its own."""
    return TokenSequence(
        completion_ids=completion_ids,
        logprobs=logprobs,
        policy_versions=[0] * len(completion_ids),
        loss_mask=loss_mask,
        advantages=advantages if any(advantages) else None,
        finish_reason=FinishReason.STOP,
        result=RewardResult(reward=reward),
        **fields,
    )


def changed(sequence: TokenSequence, **fields: Any) -> TokenSequence:
    """Return a copy with other fields, which are not checked; ``reward`` is its result's, other names are arrays'."""
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "reward":
            changes["result"] = RewardResult(reward=value)
        elif name not in TokenSequence.model_fields:
            changes["arrays"] = {**changes.get("arrays", sequence.arrays), name: np.array(value, np.float64)}
        else:
            kind = ARRAYS.get(name)
            changes[name] = value if kind is None or value is None else np.array(value, kind)
    return sequence.model_copy(update=changes)


def make_group(*, group_id: str = "g", sequences: Sequence[Any], **fields: Any) -> Group:
    """Return a group; the fields that a prompt has are the prompt's."""
    prompt = {"id": "p", "prompt": "", "ground_truth": "", "prompt_ids": [1]}
    prompt |= {name: fields.pop(name) for name in [*fields] if name in Prompt.model_fields}
    return Group.model_validate({"group_id": group_id, "prompt": prompt, "sequences": list(sequences), **fields})
