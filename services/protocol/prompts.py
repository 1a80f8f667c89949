"""Prompts, and the types of the data-server's requests and replies."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from services.protocol.base import MAX_TOKENS, Count, StrictModel, TokenId, WireModel

COLLECTORS = "collectors"
"""The consumer under whose name all collectors share the data-server's cursor."""

COLLECTOR_PREFIX = "collector-"
"""The prefix of the consumers under whose names each collector records how far it is."""


SHOWN_CHARACTERS = 300
"""Characters of a column's value that people see, because a row may hold a whole program."""
ROWS = "rows"
"""The end of the name of a part of the data's fingerprint that is there only where rows travel whole."""


class Message(WireModel):
    """A turn of a conversation, in the form that chat templates take."""

    role: str
    content: str


class Demonstration(WireModel):
    """Tokens after a prompt that are learned as they are (METHOD=sft), with their text for people.

    ``loss_mask`` is True at tokens that are trained on. ``episode`` is that of a recorded group's sequence.
    """

    completion: str
    completion_ids: list[TokenId] = Field(min_length=1, max_length=MAX_TOKENS)
    loss_mask: list[bool]
    episode: Count = 0


class Prompt(WireModel):
    """A prompt with its ground truth.

    ``id`` has the dataset's or the source's name, the split and the prompt's number, as in ``gsm8k/train/17``. With
    DATASET=seeds or harbor:DIR, ``ground_truth`` is the seed of an episode.
    ``prompt`` is the text of the user's turn. ``prompt_ids`` is the whole prompt that the model sees: the chat template
    applied and tokenised, generation marker included. ``epoch`` and ``position`` are the prompt's place in the shuffled
    order, so that a consumer can count each prompt once an epoch. ``source`` is its name in SOURCES,
    and ``row`` has the dataset's row as JSON where its reward needs more of it than the ground truth. With METHOD=sft,
    ``demonstrations`` are what is learned after the prompt. ``is_task``: environment-servers play it
    (DATASET=harbor:DIR), and its tests give the reward.
    """

    id: str
    prompt: str
    ground_truth: str
    prompt_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKENS)
    messages: list[Message] = Field(default_factory=list)
    category: str | None = None
    epoch: Count = 0
    position: Count = 0
    source: str = Field(default="", exclude_if=lambda source: not source)
    row: bytes = Field(default=b"", exclude_if=lambda row: not row)
    demonstrations: list[Demonstration] = Field(default_factory=list, exclude_if=lambda some: not some)
    is_task: bool = Field(default=False, exclude_if=lambda is_task: not is_task)

    @property
    def row_text(self) -> str | None:
        """The row's JSON as text; None without one."""
        return self.row.decode() or None

    @property
    def shown_row(self) -> dict[str, str]:
        """The row's columns for people to read, each cut after SHOWN_CHARACTERS."""
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in json.loads(self.row or "{}").items()
        }
        return {
            name: text if (more := len(text) - SHOWN_CHARACTERS) <= 0 else f"{text[:-more]}… {more} more characters"
            for name, text in texts.items()
        }


class Split(StrEnum):
    """The prompts to train on, or the prompts that are held out of training."""

    TRAIN = "train"
    TEST = "test"


class Cursor(WireModel):
    """A consumer's place in the data: it has used positions below ``position`` of ``epoch``, and those in ``skip``."""

    epoch: Count = 0
    position: Count = 0
    skip: list[Count] = Field(default_factory=list, max_length=1_000_000)


class CursorQuery(StrictModel):
    """Query of GET /cursor. ``source`` is a name in SOURCES, "" without SOURCES."""

    consumer: str = Field(default="default", min_length=1, max_length=200)
    split: Split = Split.TRAIN
    source: str = ""


class PromptsQuery(CursorQuery):
    """Query of GET /prompts. With ``epoch`` or ``position``, the server's own cursors do not move."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    epoch: Count | None = None
    position: Count | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=200)


class PromptsRequest(StrictModel):
    """Body of POST /prompts: asks for the prompts from a cursor on; the server's cursors are not used."""

    batch_size: int = Field(default=4, ge=1, le=4096)
    split: Split = Split.TRAIN
    source: str = ""
    cursor: Cursor = Field(default_factory=Cursor)


class CursorRequest(CursorQuery):
    """Body of PUT /cursor: sets the server's own cursor of a consumer."""

    cursor: Cursor


class SuccessRatesRequest(StrictModel):
    """Body of POST /success_rates: shares of right completions by prompt id; unknown ids are counted, not refused."""

    success_rates: dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]] = Field(max_length=65_536)


class SuccessRatesReply(WireModel):
    """Reply of POST /success_rates: the numbers of recorded and of unknown ids."""

    recorded: int
    unknown: int


class PromptBatch(WireModel):
    """Reply of GET and POST /prompts. ``cursor`` asks for the batch after this one."""

    prompts: list[Prompt]
    cursor: Cursor
    total_available: int = Field(ge=0)


class DataStats(BaseModel):
    """Reply of the data-server's GET /stats: prompts by split, and the consumers' cursors.

    ``rows`` is the number of the dataset's rows, and ``refused`` counts those that were left out, by reason;
    ``first_refused`` has the number of the first such row, from 0 on. ``columns`` are those of whole rows.
    ``curriculum`` is "off" if success rates do not change the order. ``fingerprint`` has an entry for each part of the
    data: equal entries mean equal prompts in the same order. ``sources`` has the same of each name in SOURCES, and
    then the other fields are sums; it is empty without SOURCES.
    """

    model_config = ConfigDict(extra="allow")

    source: str
    train_prompts: int
    test_prompts: int
    rows: int = 0
    refused: dict[str, int]
    first_refused: dict[str, int] = Field(default_factory=dict)
    columns: list[str] = Field(default_factory=list)
    cursors: dict[str, dict[str, int]] = Field(default_factory=dict)
    curriculum: str = "off"
    fingerprint: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, DataStats] = Field(default_factory=dict, exclude_if=lambda sources: not sources)

    def by_source(self) -> dict[str, DataStats]:
        """Return the statistics of each source by its name, "" without SOURCES."""
        return self.sources or {"": self}
