"""Conversations: OpenAI's replies, as far as we read those of other servers; tools; episodes as people read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

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


# --- tools that run programs in a box ---------------------------------------------------------------------------------

PROGRAMS = {"python": "code", "bash": "command"}
"""The argument that has the program, by the name of the tool."""
BOX = "box"
"""The split of ENVIRONMENT=sandbox that has no task: an empty box, for the tools of an agent."""


def _tool(name: str, argument: str) -> dict[str, Any]:
    description = f"Run a {name} program and return what it prints. Files are kept between calls."
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [_tool(name, argument) for name, argument in PROGRAMS.items()]
"""The tools in the form of OpenAI's requests."""


class CalledFunction(WireModel):
    """The function of a tool call: its name and its arguments, as JSON or as text of JSON, as the model wrote it."""

    name: str
    arguments: str | dict[str, Any]

    def program(self) -> tuple[str, str]:
        """Return the tool and the program; ValueError, with a message for the model, where they cannot be read."""
        try:
            arguments = json.loads(self.arguments) if isinstance(self.arguments, str) else self.arguments
            return self.name, "".join(arguments[PROGRAMS[self.name]])
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            takes = ", ".join(f"{name} with a text as its one argument {one!r}" for name, one in PROGRAMS.items())
            raise ValueError(f"the call cannot be read; the tools are {takes}") from error


class ToolCall(WireModel):
    """A tool call of a model's message, as OpenAI's chat completions have it."""

    id: str = Field(min_length=1, max_length=200)
    type: Literal["function"] = "function"
    function: CalledFunction


# --- episodes as people read them -------------------------------------------------------------------------------------


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
    counts the tool calls that could be parsed. ``figures`` has an environment's named numbers, as means over the
    episode's actions. ``seat`` is that of a game, and ``won`` says whether it won; both are None where there is one
    seat, and ``won`` where the game has no end.
    """

    turns: Count = 0
    tool_calls: Count = 0
    unparsed_tool_calls: Count = 0
    branches: Count = 0
    calls_repeated: Count = 0
    figures: dict[str, Finite] = Field(default_factory=dict, exclude_if=lambda figures: not figures)
    seat: Count | None = Field(default=None, exclude_if=lambda seat: seat is None)
    won: bool | None = Field(default=None, exclude_if=lambda won: won is None)
