"""Conversations: OpenAI's replies, as far as we read those of other servers; episodes as people read them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from services.protocol.base import Count, Finite, WireModel


def _joined(content: Any) -> Any:
    """Return the text of a list of blocks, of which the first may be empty or of another kind than text."""
    if not isinstance(content, list):
        return content
    return "".join(block.get("text") or "" for block in content if isinstance(block, dict))


class ChatAnswer(BaseModel):
    """The message of a choice."""

    content: Annotated[str | None, BeforeValidator(_joined)] = None


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


class ChatUsage(BaseModel):
    """The tokens that a request cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatReply(BaseModel):
    """Reply of POST /v1/chat/completions."""

    choices: list[ChatChoice] = Field(min_length=1)
    model: str = ""
    usage: ChatUsage | None = None


# --- episodes as people read them -------------------------------------------------------------------------------------


class CalledFunction(WireModel):
    """The function of a tool call: its name and its arguments, as JSON or as text of JSON, as the model wrote it."""

    name: str
    arguments: str | dict[str, Any]


class Message(WireModel):
    """A message of a conversation: what somebody says, and the tools that it calls.

    ``name`` is that of the tool whose result the message is. ``sampled`` says that the model in training wrote the
    message; the agent gave the others, among them answers of the assistant that it shows as examples. ``is_last`` says
    that the message answers the episode's last call.
    """

    role: str
    content: str = ""
    tool_calls: list[CalledFunction] = Field(default_factory=list)
    name: str | None = None
    sampled: bool = False
    is_last: bool = False


class EpisodeFigures(WireModel):
    """The size and shape of an episode.

    ``turns`` counts the calls of the model, and ``branches`` those that did not continue a held conversation, the first
    one excepted. ``calls_repeated`` counts the requests that repeated an earlier call and got its reply. ``tool_calls``
    counts the tool calls that could be parsed, and ``tools_offered`` the calls of the model with tools to choose from.
    ``figures`` has an environment's named numbers, as means over the episode's actions. ``seat`` is that of a game, and
    ``won`` says whether it won; both are None where there is one seat, and ``won`` where the game has no end.
    """

    turns: Count = 0
    tool_calls: Count = 0
    unparsed_tool_calls: Count = 0
    tools_offered: Count = 0
    branches: Count = 0
    calls_repeated: Count = 0
    figures: dict[str, Finite] = Field(default_factory=dict, exclude_if=lambda figures: not figures)
    seat: Count | None = Field(default=None, exclude_if=lambda seat: seat is None)
    won: bool | None = Field(default=None, exclude_if=lambda won: won is None)
