"""The base of all wire types, and the replies of every service."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A policy version, an epoch, a position or a number of tokens: bounded so that every store and array can hold it."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Priority = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""Bounded so that no allowed exponent makes it infinite."""

MAX_GROUP_SIZE = 1024
MAX_TOKENS = 1_048_576
MAX_SEQUENCES = 65_536
"""Most sequences in one group: an agent's episode may have several."""

PROBE = "What is 12 + 345?\n\tThe answer is: \\boxed{357}. Größe, 数学, ответ, 🙂  don't <|im_start|>user def f(x):\n"
"""A text with many scripts and symbols, so that its tokens reveal a tokenizer's merges and rules."""


class WireModel(BaseModel):
    """A record that crosses the wire. NaN and infinity are refused wherever a number is expected."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)


class StrictModel(WireModel):
    """A request that refuses unknown fields, because a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class Health(BaseModel):
    """Reply of GET /health; HTTP 503 while ``status`` is not ``healthy``."""

    model_config = ConfigDict(extra="allow")

    status: Literal["healthy", "starting", "draining", "unhealthy"]
    service: str


class Problem(BaseModel):
    """An RFC 9457 problem document; ``detail`` says what is wrong, where, and what to do."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None


class ComponentRecord(BaseModel):
    """Reply of GET /settings, and an entry of config.json: a component's settings, code and packages."""

    settings: dict[str, Any]
    """By field name; secrets are asterisks."""
    changed: list[str]
    """The settings that differ from their default."""
    packages: dict[str, str]
    """Versions by package, and Python's."""
    commit: str | None
    """The commit of the code, with ``-dirty`` if files differ from it; None outside a git checkout."""


def derive_seed(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all ``parts`` and is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
