"""Prompts, and what crosses the wire to and from the data-server."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.protocol.base import MAX_TOKENS, Count, StrictModel, TokenId, WireModel


class Message(WireModel):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


class Prompt(WireModel):
    """One prompt with its ground truth.

    ``prompt`` is the text of the user's turn, ``prompt_ids`` the whole prompt as the model sees it: the chat template
    applied and tokenised, generation marker included. ``epoch`` and ``position`` say where in the shuffled order the
    prompt stood, so that a consumer can account for each prompt once per epoch.
    """

    id: str
    prompt: str
    ground_truth: str
    prompt_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKENS)
    messages: list[Message] = Field(default_factory=list)
    category: str | None = None
    epoch: Count = 0
    position: Count = 0


class Split(StrEnum):
    """Prompts to train on, and prompts held out of training."""

    TRAIN = "train"
    TEST = "test"


class Cursor(WireModel):
    """Where a consumer stands: positions below ``position`` of ``epoch``, and those in ``skip``, are used."""

    epoch: Count = 0
    position: Count = 0
    skip: list[Count] = Field(default_factory=list, max_length=1_000_000)


class Shard(StrictModel):
    """With ``shard_count`` > 1, only prompts of shard ``shard_index`` come; shards are disjoint and together all."""

    shard_index: Count = 0
    shard_count: int = Field(default=1, ge=1, le=65_536)

    @model_validator(mode="after")
    def _shard_exists(self) -> Self:
        if self.shard_index >= self.shard_count:
            raise ValueError(f"shard_index {self.shard_index} must be below shard_count {self.shard_count}")
        return self


class PromptsQuery(Shard):
    """Query of GET /prompts. With ``epoch`` or ``position`` given, the server's own cursors are left alone."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    split: Split = Split.TRAIN
    consumer: str = Field(default="default", min_length=1, max_length=200)
    epoch: Count | None = None
    position: Count | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=200)


class PromptsRequest(Shard):
    """Body of POST /prompts: the prompts at and after a cursor, which depends on nothing that the server remembers."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    split: Split = Split.TRAIN
    cursor: Cursor = Field(default_factory=Cursor)


class CursorRequest(StrictModel):
    """Body of PUT /cursor: sets where the server's own cursor of a consumer stands."""

    consumer: str = Field(default="default", min_length=1, max_length=200)
    split: Split = Split.TRAIN
    cursor: Cursor


class SuccessRatesRequest(StrictModel):
    """Body of POST /success_rates: share of right completions by prompt id; unknown ids are counted, not an error."""

    success_rates: dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]] = Field(max_length=65_536)


class SuccessRatesReply(WireModel):
    """How many ids were known and recorded, and how many were not."""

    recorded: int
    unknown: int


class PromptBatch(WireModel):
    """Reply of GET /prompts. ``cursor`` is what to pass for the batch after this one."""

    prompts: list[Prompt]
    cursor: Cursor
    total_available: int = Field(ge=0)


class DataStats(BaseModel):
    """Reply of the data-server's GET /stats: prompts by split, rows refused by reason, and where consumers stand.

    ``curriculum`` is "off" where success rates change nothing. ``fingerprint`` has a line for each part of the data:
    equal lines mean equal prompts in an equal order.
    """

    model_config = ConfigDict(extra="allow")

    source: str
    train_prompts: int
    test_prompts: int
    refused: dict[str, int]
    cursors: dict[str, dict[str, int]] = Field(default_factory=dict)
    curriculum: str = "off"
    fingerprint: dict[str, str] = Field(default_factory=dict)
