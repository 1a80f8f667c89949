"""The tools that run programs in a box, as agents and models call them."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from services.protocol.base import WireModel

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
