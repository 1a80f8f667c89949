"""An OpenEnv server (its version 0.10) as an environment: ``ENVIRONMENT=openenv+http://host:port``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from functools import partial
from typing import Any

import httpx
import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError, Transition
from services.environment_server.openenv_schema import Forms, NotAnActionError, messages_of
from services.protocol.evaluation import Action, State

PREFIX = "openenv+"
CONNECT_SECONDS = 10.0
MAX_FRAME_BYTES = 100 * 2**20
"""As OpenEnv's own client allows."""
RETRY_SECONDS = 5.0
"""Pause before a server that has not answered is asked again."""

log = get_logger(__name__)


class OpenEnvEnvironment:
    """One episode on an OpenEnv server, over a WebSocket of its own.

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
        address = f"ws{self._url.removeprefix('http')}/ws"
        try:
            self._socket = await connect(
                address, open_timeout=CONNECT_SECONDS, max_size=MAX_FRAME_BYTES, proxy=None, compression=None
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

        An answer that is no action of the server's form is a turn without a reward, in which the model reads why.

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
        """Close the socket, which ends the episode on the server."""
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
            # Never 0, because nobody has judged the episode.
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
            raise EnvironmentBrokenError(f"{self._url} sent what is no JSON: {error}") from error
        if not isinstance(frame, dict) or not isinstance(frame.get("data"), dict) or "type" not in frame:
            raise EnvironmentBrokenError(f"{self._url} speaks another protocol: {str(frame)[:100]}")
        return frame


async def open_server(name: str, seconds: float) -> partial[OpenEnvEnvironment]:
    """Return a function that makes an environment on the server ``openenv+http://host:port``.

    Raises:
        NeverReadyError: nothing answers there within ``seconds``.
        ConfigurationError: the answer is no OpenEnv server's; the message has it.
    """
    url = name.removeprefix(PREFIX).rstrip("/")
    response = await _ask_for_schema(url, seconds)
    try:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        forms = Forms.of(orjson.loads(response.content))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{url}/schema is no OpenEnv server's: {error!r}: {response.text[:200]}") from error
    return partial(OpenEnvEnvironment, url, forms)


async def _ask_for_schema(url: str, seconds: float) -> httpx.Response:
    """Return the answer to GET ``url``/schema, and wait for a server that has not started yet."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False) as client:
        while True:
            try:
                response = await client.get(f"{url}/schema")
                if response.status_code < 500:
                    return response
                answer = f"status {response.status_code}"
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise ConfigurationError(f"{url} is no address of a server: {error}") from error
            except httpx.HTTPError as error:
                answer = repr(error)
            left = end - time.monotonic()
            if left <= 0:
                raise NeverReadyError(
                    f"{url}/schema did not answer within SERVICE_DEADLINE_SECONDS={seconds:g}: {answer}; start the "
                    "server, or correct the address"
                )
            log.info("waiting for an OpenEnv server to start", url=url, seconds_left=round(left), answer=answer)
            await asyncio.sleep(min(RETRY_SECONDS, left))


def _observation_of(result: dict[str, Any]) -> dict[str, Any]:
    observation = result.get("observation")
    if not isinstance(observation, dict):
        raise EnvironmentBrokenError(f"the server sent no observation: {str(result)[:100]}")
    return observation


def _error_of(frame: dict[str, Any]) -> str:
    data = frame["data"]
    details = f": {orjson.dumps(data['errors']).decode()[:500]}" if "errors" in data else ""
    return f"{data.get('code')}: {data.get('message')}{details}"
