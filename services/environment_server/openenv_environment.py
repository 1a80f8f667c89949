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
from urllib.parse import urlsplit

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from services.core.endpoints import proxy_of
from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError, Transition
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import Action, ActionKind, ActionSpec, State, StateKind, StateSpec

TEXT_FIELDS = ("messages", "message", "text", "result", "prompt")
"""Fields of observations that a model reads, the first that has text; ``prompt`` comes first at a reset."""
_OWN_FIELDS = frozenset({"metadata", "done", "reward"})
"""Fields that every OpenEnv record has."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_FENCED = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)

log = get_logger(__name__)


PREFIX = "openenv+"
CONNECT_SECONDS = 10.0
MAX_FRAME_BYTES = 100 * 2**20
"""The limit of OpenEnv's client."""


class OpenEnvEnvironment:
    """One episode on an OpenEnv server, over its own WebSocket.

    Nothing is sent twice, because OpenEnv's requests have no numbers: an episode whose socket breaks is lost.
    """

    def __init__(self, url: str, forms: Forms) -> None:
        self._url = url
        self._forms = forms
        self.state_spec, self.action_spec = forms.state, forms.action
        self._socket: ClientConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._messages: list[dict[str, Any]] = []
        self._is_rewarded = False

    async def reset(self, seed: int) -> State:
        """Connect, begin the episode, and return its first state.

        Raises:
            DependencyLostError: the server cannot be reached, or begins no episode.
            EnvironmentBrokenError: it speaks another protocol.
        """
        self._loop = asyncio.get_running_loop()
        proxy = proxy_of(self._url)
        address = f"ws{self._url.removeprefix('http')}/ws"
        try:
            self._socket = await connect(
                address, open_timeout=CONNECT_SECONDS, max_size=MAX_FRAME_BYTES, proxy=proxy, compression=None
            )
        except (OSError, WebSocketException) as error:
            raise DependencyLostError(f"{address} does not answer: {error}") from error
        frame = await self._ask("reset", {"seed": seed})
        if frame["type"] == "error":
            is_full = frame["data"].get("code") == "CAPACITY_REACHED"
            advice = "; raise max_concurrent_envs there, or begin fewer episodes at once" if is_full else ""
            raise DependencyLostError(f"{self._url} begins no episode: {_error_of(frame)}{advice}")
        observation = _observation_of(frame["data"])
        if self._forms.state_field is not None:
            return self._numbers(observation)
        self._messages = [*self._forms.rules(), *messages_of(observation, is_first=True)]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Send an action and return the state after it.

        An answer that is not an action of the server's form is a turn without a reward, in which the model reads why.

        Raises:
            ActionRefusedError: a number that the server does not take.
            DependencyLostError: the socket broke.
            EnvironmentBrokenError: the server's environment failed, or the episode ended without any reward.
        """
        is_text = self._forms.state_field is None
        try:
            data = self._forms.encode(action)
        except NotAnActionError as error:
            if is_text:
                return self._turn(str(action), [{"role": "user", "content": str(error)}])
            raise ActionRefusedError(str(error)) from error
        frame = await self._ask("step", data)
        if frame["type"] == "error":
            refusal = _error_of(frame)
            if frame["data"].get("code") != "VALIDATION_ERROR":
                raise EnvironmentBrokenError(f"{self._url} took no step: {refusal}")
            if is_text:
                return self._turn(str(action), [{"role": "user", "content": refusal}])
            raise ActionRefusedError(refusal)
        result = frame["data"]
        observation = _observation_of(result)
        reward, is_done, is_truncated = self._outcome(result)
        if is_text:
            news = messages_of(observation, is_first=False)
            return self._turn(str(action), news, reward, is_done and not is_truncated, is_truncated)
        return Transition(self._numbers(observation), reward, is_done and not is_truncated, is_truncated)

    def close(self) -> None:
        """Close the socket, so that the server ends the episode."""
        if self._socket is not None and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._socket.close(), self._loop)

    def _turn(
        self,
        text: str,
        news: list[dict[str, Any]],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Transition:
        self._messages += [{"role": "assistant", "content": text}, *news]
        return Transition(list(self._messages), reward, terminated, truncated)

    def _outcome(self, result: dict[str, Any]) -> tuple[float, bool, bool]:
        """Return the reward, and whether the episode is done and whether it was truncated."""
        reward, is_done = result.get("reward"), bool(result.get("done"))
        if reward is not None:
            if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
                raise EnvironmentBrokenError(f"{self._url} gave the reward {reward!r}")
            self._is_rewarded = True
        if is_done and not self._is_rewarded:
            # Never 0, because the episode has not been judged.
            raise EnvironmentBrokenError(f"{self._url} ended the episode without any reward")
        metadata = result.get("metadata")
        is_truncated = is_done and isinstance(metadata, dict) and metadata.get("truncated") is True
        return float(reward or 0.0), is_done, is_truncated

    def _numbers(self, observation: dict[str, Any]) -> State:
        state: State | None = observation.get(str(self._forms.state_field))
        if state is None:
            raise EnvironmentBrokenError(f"{self._url} gave an observation without {self._forms.state_field!r}")
        return state

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the frame that answers it, which has a type and data."""
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
        return frame


async def ask_for_forms(name: str, seconds: float) -> tuple[str, Forms]:
    """Return the URL of the server ``openenv+http://host:port`` and the forms of its states and actions.

    Raises:
        NeverReadyError: nothing answers there within ``seconds``.
        ConfigurationError: the answer is not an OpenEnv server's; the message has it.
    """
    url = name.removeprefix(PREFIX).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{url} is not the address of a server")
    async with HttpClient(url, service="an OpenEnv server", timeout=CONNECT_SECONDS, deadline=seconds) as client:
        if not await client.is_healthy():
            log.info("waiting for an OpenEnv server to start", url=url, seconds=seconds)
        try:
            response = await client.request("GET", "/schema")
            return url, Forms.of(orjson.loads(response.content))
        except DependencyLostError as error:
            raise NeverReadyError(
                f"{url}/schema did not answer within SERVICE_DEADLINE_SECONDS={seconds:g}: {error}; start the server, "
                "or correct the address"
            ) from error
        except RequestRefusedError as error:
            raise ConfigurationError(
                f"{url}/schema is not an OpenEnv server's: {error.status} {error.detail}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{url}/schema is not an OpenEnv server's: {error!r}: {response.text[:200]}"
            ) from error


def _observation_of(result: dict[str, Any]) -> dict[str, Any]:
    observation = result.get("observation")
    if not isinstance(observation, dict):
        raise EnvironmentBrokenError(f"the server sent no observation: {str(result)[:100]}")
    return observation


def _error_of(frame: dict[str, Any]) -> str:
    data = frame["data"]
    details = f": {orjson.dumps(data['errors']).decode()[:500]}" if "errors" in data else ""
    return f"{data.get('code')}: {data.get('message')}{details}"


class NotAnActionError(ValueError):
    """An answer that is not an action of the server's form; the message describes the form."""


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
            raise NotAnActionError(f"Your answer is not JSON ({error}). {self.rules()[0]['content']}") from error
        if isinstance(value, dict):
            return value
        if self.action_field is None:
            raise NotAnActionError(f"Your answer is not a JSON object. {self.rules()[0]['content']}")
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
