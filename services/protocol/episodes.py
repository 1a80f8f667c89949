"""An agent's episode as people read it: its figures and its conversations."""

from __future__ import annotations

from pydantic import Field

from services.protocol.base import Count, Finite, WireModel


class CalledTool(WireModel):
    """A tool call of a message; ``arguments`` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


class Message(WireModel):
    """A message of a conversation: what somebody says, and the tools that it calls.

    ``name`` is that of the tool whose result the message is. ``sampled`` says that the model in training wrote the
    message; the agent gave the others, among them answers of the assistant that it shows as examples. ``is_last`` says
    that the message answers the episode's last call.
    """

    role: str
    content: str = ""
    tool_calls: list[CalledTool] = Field(default_factory=list)
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
