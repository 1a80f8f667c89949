"""Groups as compact bytes: a JSON header for text and numbers, then token ids as int32 and logprobs as float32.

Logprobs that float32 cannot hold exactly are float64, so that every group is unpacked exactly as it was given.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

import numpy as np
import orjson

from services.protocol.groups import Group

_PREFIX = struct.Struct("<BcI")
_VERSION = 1
_OPTIONAL = {"loss_mask", "advantages", "episode", "seat", "messages", "turns"}


def pack(group: Group) -> bytes:
    """Return a group as bytes."""
    header = {
        "group": group.model_dump(mode="json", exclude={"experiences", "prompt_ids"}),
        "prompt": len(group.prompt_ids),
        "experiences": [
            {
                "completion": e.completion,
                "policy_versions": [(span.version, span.start, span.end) for span in e.policy_versions],
                "finish_reason": e.finish_reason.value,
                "result": e.result.model_dump(mode="json"),
                "tokens": len(e.completion_ids),
                **e.model_dump(include=_OPTIONAL, exclude_none=True),
            }
            for e in group.experiences
        ],
    }
    ids = np.fromiter(chain(group.prompt_ids, *(e.completion_ids for e in group.experiences)), np.int32)
    exact = np.fromiter(chain.from_iterable(e.logprobs for e in group.experiences), np.float64)
    # A logprob beyond float32's range becomes infinite here, differs, and is kept as float64.
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    logprobs = short if np.array_equal(short, exact) else exact
    text = orjson.dumps(header)
    kind = b"f" if logprobs.dtype == np.float32 else b"d"
    return b"".join((_PREFIX.pack(_VERSION, kind, len(text)), text, ids.tobytes(), logprobs.tobytes()))


def unpack(data: bytes | memoryview) -> dict[str, Any]:
    """Return a packed group in its wire form, with numpy arrays for token ids (int32) and logprobs (float64).

    Raises:
        ValueError: another version of this program packed the group.
    """
    version, kind, length = _PREFIX.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"a stored group has format {version}; this program reads {_VERSION}")
    start = _PREFIX.size + length
    header = orjson.loads(memoryview(data)[_PREFIX.size : start])
    prompt_tokens = header["prompt"]
    tokens = sum(e["tokens"] for e in header["experiences"])
    ids = np.frombuffer(data, np.int32, prompt_tokens + tokens, start)
    stored = np.frombuffer(data, np.float32 if kind == b"f" else np.float64, tokens, start + ids.nbytes)
    logprobs = stored.astype(np.float64)
    experiences = []
    place = 0
    for e in header["experiences"]:
        end = place + e.pop("tokens")
        experiences.append(
            {
                **e,
                "policy_versions": [{"version": v, "start": s, "end": t} for v, s, t in e["policy_versions"]],
                "completion_ids": ids[prompt_tokens + place : prompt_tokens + end],
                "logprobs": logprobs[place:end],
            }
        )
        place = end
    return {**header["group"], "prompt_ids": ids[:prompt_tokens], "experiences": experiences}
