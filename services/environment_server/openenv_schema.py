"""An OpenEnv server's schemas as forms of states and actions here.

A server is an environment of numbers if its observations have one field of numbers with a fixed shape, and its actions
one field: an index with bounds, or numbers. Any other is a conversation. The model reads the first of an observation's
usual fields of text, or its JSON; the model's answer is the action's only string field, or JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from services.protocol.evaluation import Action, ActionKind, ActionSpec, StateKind, StateSpec

TEXT_FIELDS = ("messages", "message", "text", "result", "prompt")
"""Fields of observations that a model reads, the first that has text; ``prompt`` comes first at a reset."""
_OWN_FIELDS = frozenset({"metadata", "done", "reward"})
"""Fields that every OpenEnv record has."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_FENCED = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)


class NotAnActionError(ValueError):
    """An answer that is no action of the server's form; the message says which form it has."""


@dataclass(frozen=True)
class Forms:
    """The forms of a server's states and actions.

    ``state_field`` is the observation's field of numbers, None for a conversation. ``action_field`` is the only field
    of the action, and ``action_schema`` the JSON schema of the whole action.
    """

    state: StateSpec
    action: ActionSpec
    state_field: str | None
    action_field: str | None
    action_schema: dict[str, Any]

    @classmethod
    def of(cls, schemas: dict[str, Any]) -> Forms:
        """Return the forms that the reply of GET /schema describes.

        Raises:
            KeyError, TypeError: it is no such reply.
        """
        action_schema, observation = schemas["action"], schemas["observation"]
        field = _only_field(action_schema)
        action = _numbers_action(action_schema["properties"][field]) if field is not None else None
        states = {name: _shape(s) for name, s in observation.get("properties", {}).items() if name not in _OWN_FIELDS}
        numeric = [(name, shape) for name, shape in states.items() if shape is not None]
        if action is not None and len(numeric) == 1:
            name, shape = numeric[0]
            return cls(StateSpec(kind=StateKind.NUMBERS, shape=shape), action, name, field, action_schema)
        text = ActionSpec(kind=ActionKind.TEXT)
        return cls(StateSpec(kind=StateKind.MESSAGES), text, None, field, action_schema)

    @property
    def _is_plain_text(self) -> bool:
        field = self.action_field
        return field is not None and self.action_schema["properties"][field].get("type") == "string"

    def rules(self) -> list[dict[str, Any]]:
        """Return the messages that tell a model the form of its answers; none where an answer is plain text."""
        if self._is_plain_text:
            return []
        schema = orjson.dumps(self.action_schema).decode()
        return [{"role": "system", "content": f"Answer with a JSON object alone, an action of this schema: {schema}"}]

    def encode(self, action: Action) -> dict[str, Any]:
        """Return an action as the server takes it.

        Raises:
            NotAnActionError: the answer of a model is not JSON of the server's form.
        """
        if self.state_field is not None or self._is_plain_text:
            return {str(self.action_field): action}
        fenced = _FENCED.fullmatch(str(action))
        try:
            value = orjson.loads(fenced.group(1) if fenced else str(action))
        except orjson.JSONDecodeError as error:
            raise NotAnActionError(f"Your answer is no JSON ({error}). {self.rules()[0]['content']}") from error
        if isinstance(value, dict):
            return value
        if self.action_field is None:
            raise NotAnActionError(f"Your answer is no JSON object. {self.rules()[0]['content']}")
        return {self.action_field: value}


def messages_of(observation: dict[str, Any], *, is_first: bool) -> list[dict[str, Any]]:
    """Return the messages that a model reads of an observation: those of TEXT_FIELDS, or its JSON in one."""
    for name in ("prompt", *TEXT_FIELDS) if is_first else TEXT_FIELDS:
        value = observation.get(name)
        if isinstance(value, str) and value.strip():
            return [{"role": "user", "content": value}]
        if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in value):
            roles = [m.get("role") if m.get("role") in _ROLES else "user" for m in value]
            if value or len(observation.keys() - _OWN_FIELDS) == 1:
                return [{"role": role, "content": m["content"]} for role, m in zip(roles, value, strict=True)]
    rest = {name: value for name, value in observation.items() if name not in _OWN_FIELDS}
    return [{"role": "user", "content": orjson.dumps(rest).decode()}] if rest else []


def _only_field(schema: dict[str, Any]) -> str | None:
    """Return an action's only field: the only required one, or the only one there is."""
    fields = [name for name in schema.get("properties", {}) if name not in _OWN_FIELDS]
    required = [name for name in fields if name in schema.get("required", [])]
    return required[0] if len(required) == 1 else fields[0] if len(fields) == 1 else None


def _numbers_action(schema: dict[str, Any]) -> ActionSpec | None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") == "integer" and isinstance(low, int) and isinstance(high, int) and low <= high:
        return ActionSpec(kind=ActionKind.INDEX, count=high - low + 1, start=low)
    shape = _shape(schema)
    return ActionSpec(kind=ActionKind.NUMBERS, shape=shape) if shape else None


def _shape(schema: dict[str, Any]) -> list[int] | None:
    """Return the shape of nested lists of numbers, [] for one number; None for anything else."""
    if schema.get("type") in ("number", "integer"):
        return []
    size = schema.get("minItems")
    if schema.get("type") != "array" or not isinstance(size, int) or size != schema.get("maxItems"):
        return None
    inner = _shape(schema.get("items", {}))
    return None if inner is None else [size, *inner]
