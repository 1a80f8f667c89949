"""An OpenEnv server (its version 0.10) as an environment: ``ENVIRONMENT=openenv+http://host:port``.

The server's schemas say which form its states and actions have here. A server is an environment of numbers if its
observations have one field of numbers with a fixed shape, and its actions one field: an index with bounds, or numbers.
Any other is a conversation. The model reads the first of an observation's usual fields of text, or its JSON; its
answer is the action's only string field, or JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from services.core.endpoints import proxy_of
from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError, Transition
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import Action, ActionKind, ActionSpec, State, StateKind, StateSpec

PREFIX = "openenv+"
CONNECT_SECONDS = 10.0
MAX_FRAME_BYTES = 100 * 2**20
"""The limit of OpenEnv's client."""
TEXT_FIELDS = ("messages", "message", "text", "result", "prompt")
"""Fields of observations that a model reads, the first that has text; ``prompt`` comes first at a reset."""
_OWN_FIELDS = frozenset({"metadata", "done", "reward"})
"""Fields that every OpenEnv record has."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_FENCED = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)


class OpenEnvEnvironment:
    """One episode on an OpenEnv server, over its own WebSocket.

    Nothing is sent twice, because OpenEnv's requests have no numbers: an episode whose socket breaks is lost.
    """

    def __init__(self, url: str, forms: Forms) -> None:
        self._url = url
        self._forms = forms
        self.state_spec, self.action_spec = forms.state, forms.action
        self._socket: ClientConnection | None = None
        self._messages: list[dict[str, Any]] = []
        self._is_rewarded = False

    async def reset(self, seed: int) -> State:
        """Connect, begin the episode, and return its first state.

        Raises:
            DependencyLostError: the server cannot be reached, or begins no episode.
            EnvironmentBrokenError: it speaks another protocol.
        """
        self._loop = asyncio.get_running_loop()
        address = f"ws{self._url.removeprefix('http')}/ws"
        options: dict[str, Any] = {"max_size": MAX_FRAME_BYTES, "proxy": proxy_of(self._url), "compression": None}
        try:
            self._socket = await connect(address, open_timeout=CONNECT_SECONDS, **options)
        except (OSError, WebSocketException) as error:
            raise DependencyLostError(f"{address} does not answer: {error}") from error
        result, refusal = await self._ask("reset", {"seed": seed})
        if refusal:
            advice = "; raise max_concurrent_envs there, or begin fewer episodes at once"
            is_full = result.get("code") == "CAPACITY_REACHED"
            raise DependencyLostError(f"{self._url} begins no episode: {refusal}{advice if is_full else ''}")
        self._messages = self._forms.rules()
        return self._state_of(result, is_first=True)

    async def step(self, action: Action) -> Transition:
        """Send an action and return the state after it.

        An answer that is not an action of the server's form is a turn without a reward, in which the model reads why.

        Raises:
            ActionRefusedError: a number that the server does not take.
            DependencyLostError: the socket broke.
            EnvironmentBrokenError: the server's environment failed, or the episode ended without any reward.
        """
        self._messages.append({"role": "assistant", "content": str(action)})
        try:
            result, refusal = await self._ask("step", self._forms.encode(action))
        except ActionRefusedError as error:
            result, refusal = {"code": "VALIDATION_ERROR"}, str(error)
        if refusal and result.get("code") != "VALIDATION_ERROR":
            raise EnvironmentBrokenError(f"{self._url} took no step: {refusal}")
        if refusal and self._forms.state_field is not None:
            raise ActionRefusedError(refusal)
        if refusal:
            self._messages.append({"role": "user", "content": refusal})
            return Transition([*self._messages], 0.0, False, False)
        reward, is_done, metadata = result.get("reward"), bool(result.get("done")), result.get("metadata")
        if reward is not None and not (isinstance(reward, bool | int | float) and math.isfinite(reward)):
            raise EnvironmentBrokenError(f"{self._url} gave the reward {reward!r}")
        self._is_rewarded |= reward is not None
        if is_done and not self._is_rewarded:
            # Never 0, because the episode has not been judged.
            raise EnvironmentBrokenError(f"{self._url} ended the episode without any reward")
        is_truncated = is_done and isinstance(metadata, dict) and metadata.get("truncated") is True
        return Transition(self._state_of(result), float(reward or 0.0), is_done and not is_truncated, is_truncated)

    def close(self) -> None:
        """Close the socket, so that the server ends the episode."""
        if self._socket is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._socket.close(), self._loop)

    def _state_of(self, result: dict[str, Any], *, is_first: bool = False) -> State:
        """Return the state that an observation leads to."""
        observation, field = result.get("observation"), self._forms.state_field
        if not isinstance(observation, dict) or (field is not None and field not in observation):
            raise EnvironmentBrokenError(f"{self._url} sent no observation as its schema has it: {str(result)[:100]}")
        if field is not None:
            numbers: State = observation[field]
            return numbers
        self._messages += messages_of(observation, is_first=is_first)
        return [*self._messages]

    async def _ask(self, kind: str, data: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Send a message; return the data of the frame that answers it, and why the server refused, or ""."""
        assert self._socket is not None
        try:
            # After the server has closed the socket, its reason may still be there to be received.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(orjson.dumps({"type": kind, "data": data}).decode())
            frame = orjson.loads(await self._socket.recv())
        except WebSocketException as error:
            raise DependencyLostError(f"the socket to {self._url} broke: {error}") from error
        except orjson.JSONDecodeError as error:
            raise EnvironmentBrokenError(f"{self._url} sent something else than JSON: {error}") from error
        if not isinstance(frame, dict) or not isinstance(frame.get("data"), dict) or "type" not in frame:
            raise EnvironmentBrokenError(f"{self._url} speaks another protocol: {str(frame)[:100]}")
        answer: dict[str, Any] = frame["data"]
        if frame["type"] != "error":
            return answer, ""
        details = f": {orjson.dumps(answer['errors']).decode()[:500]}" if "errors" in answer else ""
        return answer, f"{answer.get('code')}: {answer.get('message')}{details}"


async def ask_for_forms(name: str, seconds: float) -> tuple[str, Forms]:
    """Return the URL of the server ``openenv+http://host:port`` and the forms of its states and actions.

    Raises:
        NeverReadyError: nothing answers there within ``seconds``.
        ConfigurationError: the answer is not an OpenEnv server's; the message has it.
    """
    url = name.removeprefix(PREFIX).rstrip("/")
    if not re.match(r"https?://[^/:]", url):
        raise ConfigurationError(f"{url} is not the address of a server")
    async with HttpClient(url, service="an OpenEnv server", timeout=CONNECT_SECONDS, deadline=seconds) as client:
        try:
            response = await client.request("GET", "/schema")
            return url, Forms.of(orjson.loads(response.content))
        except DependencyLostError as error:
            raise NeverReadyError(
                f"{url}/schema did not answer within SERVICE_DEADLINE_SECONDS={seconds:g}: {error}; start the server, "
                "or correct the address"
            ) from error
        except (RequestRefusedError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{url}/schema is not an OpenEnv server's: {error}") from error


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
            KeyError, TypeError: it is another reply.
        """
        schema, observation = schemas["action"], schemas["observation"].get("properties", {})
        fields = [name for name in schema.get("properties", {}) if name not in _OWN_FIELDS]
        required = [name for name in fields if name in schema.get("required", [])]
        # The only required field, or the only one there is.
        field = next((names[0] for names in (required, fields) if len(names) == 1), None)
        action = None if field is None else _numbers_action(schema["properties"][field])
        shapes = {name: _shape(form) for name, form in observation.items() if name not in _OWN_FIELDS}
        numeric = {name: shape for name, shape in shapes.items() if shape is not None}
        if action is None or len(numeric) != 1:
            text = ActionSpec(kind=ActionKind.TEXT)
            return cls(StateSpec(kind=StateKind.MESSAGES), text, None, field, schema)
        [(name, shape)] = numeric.items()
        return cls(StateSpec(kind=StateKind.NUMBERS, shape=shape), action, name, field, schema)

    @property
    def _takes_value(self) -> bool:
        """True if an action, as numbers or as text, is the value of the action's only field."""
        field = self.action_field
        is_text = field is not None and self.action_schema["properties"][field].get("type") == "string"
        return self.state_field is not None or is_text

    def rules(self) -> list[dict[str, Any]]:
        """Return the messages that tell a model the form of its answers; none where an answer is plain text."""
        if self._takes_value:
            return []
        schema = orjson.dumps(self.action_schema).decode()
        return [{"role": "system", "content": f"Answer with a JSON object alone, an action of this schema: {schema}"}]

    def encode(self, action: Action) -> dict[str, Any]:
        """Return an action as the server takes it.

        Raises:
            ActionRefusedError: the answer of a model is not JSON of the server's form, which the message describes.
        """
        if self._takes_value:
            return {str(self.action_field): action}
        fenced = _FENCED.fullmatch(str(action))
        try:
            value = orjson.loads(fenced[1] if fenced else str(action))
        except orjson.JSONDecodeError as error:
            raise ActionRefusedError(f"Your answer is not JSON ({error}). {self.rules()[0]['content']}") from error
        if not isinstance(value, dict) and self.action_field is None:
            raise ActionRefusedError(f"Your answer is not a JSON object. {self.rules()[0]['content']}")
        return value if isinstance(value, dict) else {str(self.action_field): value}


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
