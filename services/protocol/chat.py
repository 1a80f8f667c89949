"""The reply of OpenAI's chat completions, as far as our programs read it from other servers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field


def _joined(content: Any) -> Any:
    """Return the text of a list of blocks, of which the first may be empty or of another kind than text."""
    if not isinstance(content, list):
        return content
    return "".join(block.get("text") or "" for block in content if isinstance(block, dict))


class ChatAnswer(BaseModel):
    """The message of a choice."""

    content: Annotated[str | None, BeforeValidator(_joined)] = None


class TokenLogprob(BaseModel):
    """A token of an answer, with the likeliest tokens in its place."""

    token: str = ""
    logprob: float
    top_logprobs: list[TokenLogprob] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    """The tokens of an answer; None without ``logprobs`` in the request."""

    content: list[TokenLogprob] | None = None


class ChatChoice(BaseModel):
    """One of a reply's answers."""

    message: ChatAnswer
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatUsage(BaseModel):
    """The tokens that a request cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatReply(BaseModel):
    """Reply of POST /v1/chat/completions."""

    choices: list[ChatChoice] = Field(min_length=1)
    model: str = ""
    usage: ChatUsage | None = None
