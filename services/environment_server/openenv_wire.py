"""OpenEnv's records (its version 0.10): the JSON schemas of an environment here, its actions and observations.

An action has one field: ``text`` for a conversation, ``action`` (an index or numbers) for any other environment. An
observation has ``messages``, those that came since the last action, or ``state``, numbers.
"""

from __future__ import annotations

from typing import Any

import orjson

from services.environment_server.environments import ActionRefusedError
from services.protocol.evaluation import Action, ActionKind, ActionSpec, EnvironmentInfo, State, StateKind, StateSpec

_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    "required": ["role", "content"],
}


class OpenEnvError(Exception):
    """An error that a frame of type ``error`` reports; ``code`` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def schemas(info: EnvironmentInfo) -> dict[str, Any]:
    """Return the JSON schemas of ``action``, ``observation`` and ``state``, the reply of GET /schema."""
    field, schema = _field(info.action.kind), _action_value(info.action)
    observation = _observation_value(info.state)
    return {
        "action": _object("EnvironmentAction", {field: schema, "metadata": {"type": "object"}}, [field]),
        "observation": _object("EnvironmentObservation", observation, list(observation)),
        "state": _object(
            "EnvironmentState",
            {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
            ["step_count"],
        ),
    }


def decode_action(spec: ActionSpec, data: dict[str, Any]) -> Action:
    """Return the action of a step.

    A number, list or object in the place of text becomes its JSON, because clients parse a model's answer "42" first.

    Raises:
        ActionRefusedError: the field is missing, or there are others.
    """
    field = _field(spec.kind)
    if field not in data or data.keys() - {field, "metadata"}:
        raise ActionRefusedError(f"the action has the fields {sorted(data)[:10]}; it must have {field!r} alone")
    value = data[field]
    if spec.kind is ActionKind.TEXT and not isinstance(value, str):
        return orjson.dumps(value).decode()
    action: Action = value
    return action


def encode_observation(spec: StateSpec, before: State | None, state: State) -> dict[str, Any]:
    """Return the observation of ``state``; ``before`` is the state that the last action was for."""
    if spec.kind is StateKind.NUMBERS:
        return {"state": state}
    assert isinstance(state, list)
    if not isinstance(before, list) or state[: len(before)] != before:
        return {"messages": state}
    added = state[len(before) :]
    # The first message that was added is the action itself.
    return {"messages": added[1:] if added and added[0].get("role") == "assistant" else added}


def _field(kind: ActionKind) -> str:
    return "text" if kind is ActionKind.TEXT else "action"


def _action_value(spec: ActionSpec) -> dict[str, Any]:
    if spec.kind is ActionKind.TEXT:
        return {"type": "string"}
    if spec.kind is ActionKind.INDEX:
        assert spec.count is not None
        return {"type": "integer", "minimum": spec.start, "maximum": spec.start + spec.count - 1}
    return numbers_schema(spec.shape)


def _observation_value(spec: StateSpec) -> dict[str, Any]:
    if spec.kind is StateKind.NUMBERS:
        return {"state": numbers_schema(spec.shape)}
    return {"messages": {"type": "array", "items": _MESSAGE}}


def numbers_schema(shape: list[int]) -> dict[str, Any]:
    """Return the JSON schema of nested lists of numbers."""
    schema: dict[str, Any] = {"type": "number"}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


def _object(title: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "title": title, "properties": properties, "required": required}
