"""OpenAI's chat completions: replies, as far as our programs read them from other servers, and calls of tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from services.protocol.base import WireModel


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
    """The function of a tool call: its name and its arguments, as JSON or as text of JSON."""

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
