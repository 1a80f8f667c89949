"""The reply of OpenAI's chat completions, as far as our programs read it from other servers."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ChatAnswer(BaseModel):
    """The message of a choice."""

    content: str | None = None


class TokenLogprob(BaseModel):
    """A token of an answer."""

    logprob: float


class ChatLogprobs(BaseModel):
    """The tokens of an answer; None without ``logprobs`` in the request."""

    content: list[TokenLogprob] | None = None


class ChatChoice(BaseModel):
    """One of a reply's answers."""

    message: ChatAnswer
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatReply(BaseModel):
    """Reply of POST /v1/chat/completions."""

    choices: list[ChatChoice] = Field(min_length=1)
