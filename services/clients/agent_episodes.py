"""Episodes of agents through the gateway, which samples and records them: in training and in ``grpo evaluate``."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import httpx

from services.agents import Agent, AgentFailedError, Example, play
from services.clients.gateway import GatewayClient
from services.clients.play import Score
from services.clients.rollout import SamplingParams
from services.core.errors import DependencyLostError, own_error
from services.core.logs import get_logger
from services.core.settings import EpisodeLimits
from services.core.tasks import Stopwatch
from services.http.client import RequestRefusedError, pool_for
from services.protocol.base import derive_seed
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult, RewardStatus
from services.protocol.sessions import DEADLINE, REQUEST_MARK, CreateSessionRequest, Trace

T = TypeVar("T")

log = get_logger(__name__)

NO_ENGINE = "no engine answered the last call within twice AGENT_SECONDS"
OVER_LIMIT = ("timeout", "limit")
"""Reasons of failure for which the model is at fault: the answer is wrong."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
_UNREACHABLE = frozenset({502, 503, 504})
_LOST = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)


class GatewayFailedError(Exception):
    """The gateway did not answer, or refused, a request about an episode."""

    def __init__(self, error: DependencyLostError | RequestRefusedError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Episode:
    """An episode that has ended; without a reward, ``failure`` is the agent's error, or None if it gave no reward.

    An episode over a limit has no reward here.
    """

    trace: Trace
    result: RewardResult
    failure: AgentFailedError | None
    turn_rewards: Sequence[float] = ()
    """One a call of the model; none where the agent gave the episode's reward alone."""
    figures: dict[str, float] = field(default_factory=dict)
    seat: int | None = None
    """The seat of a game; None where there is one seat."""

    @property
    def is_over_limit(self) -> bool:
        """True if it is wrong because it exceeds a limit."""
        return self.result.status is RewardStatus.OVER_LIMIT

    @property
    def has_won(self) -> bool | None:
        """True if the seat's rewards sum to more than 0; None without seats or rewards. Over a limit it is lost."""
        if self.seat is None or (self.result.reward is None and not self.is_over_limit):
            return None
        return (self.result.reward or 0.0) > 0


class EpisodePlayer:
    """Plays episodes, each in its own session at the gateway."""

    def __init__(
        self,
        gateway: GatewayClient,
        model: str,
        score: Score,
        limits: EpisodeLimits,
        *,
        patience: float,
    ) -> None:
        """Make a player.

        Args:
            gateway: its client, within whose context the episodes are played.
            model: the model's name in requests.
            score: scores the answers of agents that ask for it.
            limits: the limits of an episode, and the columns of a row that agents see.
            patience: seconds for which an agent's request is sent again while the gateway is away.
        """
        self.gateway = gateway
        self._model = model
        self._score = score
        self._limits = limits
        self._patience = patience

    def session(
        self, params: SamplingParams, seed: int, index: int, *, group_id: str = "", lora_path: str | None = None
    ) -> CreateSessionRequest:
        """Return the request for the session of episode ``index`` of a prompt whose answers have ``seed``."""
        return CreateSessionRequest(
            # Another attempt at the same prompt, after a restart, must not continue this session.
            id=f"{group_id or 'evaluation'}-{index}-{uuid.uuid4().hex[:12]}",
            group_id=group_id,
            index=index,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=derive_seed(seed, index),
            max_turn_tokens=params.max_new_tokens,
            max_turns=self._limits.agent_max_turns,
            max_tokens=self._limits.agent_max_tokens,
            deadline_seconds=2 * self._limits.agent_seconds,
            lora_path=lora_path,
        )

    async def play(
        self,
        agent: Agent,
        prompt: Prompt,
        request: CreateSessionRequest,
        *,
        seat: int | None = None,
    ) -> Episode:
        """Let an agent answer a prompt in the session that ``request`` opens; return the episode.

        Raises:
            GatewayFailedError: the gateway failed.
            DependencyLostError: the reward-server was lost.
        """
        await _reply(self.gateway.create(request))
        scored: list[RewardResult] = []

        async def score(response: str) -> RewardResult:
            # The reward may read columns that the agent must not see, such as hidden tests.
            scored[:] = await self._score([RewardItem.of(prompt, response)])
            return scored[0]

        example = Example.of(prompt, self._limits.visible_columns, model=self._model, scorer=score)
        result, failure = await self._run(agent, example, request)
        if result.status is RewardStatus.ERROR and any(result is one for one in scored):
            failure = AgentFailedError(str(result.reason), "reward_error")
        trace = await _reply(self.gateway.finish(request.id, result.reward, result.reason))
        if failure is not None and failure.reason == "exception" and trace.is_cut:
            # Such as OpenAI's Agents SDK over a Response that is incomplete.
            reason = f"the last answer was cut off at the length limit (MAX_NEW_TOKENS): {failure}"
            failure = AgentFailedError(reason, "limit")
            result = RewardResult(reward=None, status=RewardStatus.OVER_LIMIT, reason=reason)
        if trace.refused == DEADLINE and failure is None:
            failure = AgentFailedError(f"{NO_ENGINE}; the agent caught that and returned {result.reward}", "server")
            result = RewardResult(reward=None, status=RewardStatus.ERROR, reason=str(failure))
        return _checked(Episode(trace, result, failure, example.turn_rewards, example.figures, seat))

    async def _run(
        self, agent: Agent, example: Example, request: CreateSessionRequest
    ) -> tuple[RewardResult, AgentFailedError | None]:
        """Let the agent play, and return the result of the episode, with the agent's error if it failed.

        Raises:
            DependencyLostError: the reward-server was lost.
        """
        transport = RetryingTransport(self._patience, example.waits)

        async def waited() -> float:
            try:
                session = await _reply(self.gateway.session(request.id))
            except GatewayFailedError as error:
                raise AgentFailedError(str(error), "server") from error
            # An agent may use its own client to ask the gateway.
            return max(example.waits.seconds, session.waited_seconds)

        try:
            async with httpx.AsyncClient(transport=transport, timeout=request.deadline_seconds) as http_client:
                reward = await play(
                    agent,
                    example,
                    self._limits.agent_seconds,
                    base_url=self.gateway.agent_url(request.id),
                    api_key=request.id,
                    http_client=http_client,
                    waited=waited,
                )
        except DependencyLostError:
            raise
        # An agent may raise anything, and one failed episode must not end the others.
        except Exception as error:  # noqa: BLE001
            failure = as_failure(error)
            if failure.reason in ("exception", "timeout"):
                failure = await self._as_gateway_knows(failure, request.id)
            if failure.reason == "exception" and transport.is_lost:
                failure.reason = "server"
            log.info("episode failed", session=request.id, reason=str(failure))
            status = RewardStatus.OVER_LIMIT if failure.reason in OVER_LIMIT else RewardStatus.ERROR
            return RewardResult(reward=None, status=status, reason=str(failure)), failure
        return example.result_of(reward), None

    async def _as_gateway_knows(self, failure: AgentFailedError, session_id: str) -> AgentFailedError:
        """Return the failure with the gateway's reason, which an agent's own error may lack."""
        try:
            session = await self.gateway.session(session_id)
        except (DependencyLostError, RequestRefusedError):
            return failure
        if session.refused == DEADLINE:
            return AgentFailedError(f"{NO_ENGINE}: {failure}", "server")
        if failure.reason == "exception" and session.refused is not None:
            failure.reason = "limit"
        if failure.reason == "timeout" and not session.called:
            limit = f"AGENT_SECONDS={self._limits.agent_seconds:g}; raise it, or see where the agent waits"
            return AgentFailedError(f"the agent made no call within {limit}", "no_call")
        return failure


async def _reply(answer: Awaitable[T]) -> T:
    """Return the gateway's answer.

    Raises:
        GatewayFailedError: the gateway gave none.
    """
    try:
        return await answer
    except (DependencyLostError, RequestRefusedError) as error:
        raise GatewayFailedError(error) from error


def _checked(episode: Episode) -> Episode:
    """Return an episode; without a reward if the agent's rewards of turns are not one finite number a call."""
    rewards, calls = episode.turn_rewards, episode.trace.turns
    if not rewards or episode.result.reward is None or (len(rewards) == calls and all(map(math.isfinite, rewards))):
        return episode
    reason = (
        f"the agent's turn_rewards are {len(rewards)} for {calls} calls of the model, or not finite; give one a call"
    )
    failure = AgentFailedError(reason, "turn_rewards")
    return replace(episode, result=RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason), failure=failure)


def as_failure(error: Exception) -> AgentFailedError:
    """Return an agent's error with its reason: ``server``, what the agent says, or ``exception``.

    The errors of httpx and of OpenAI's and Anthropic's clients have the reply as ``response``.
    """
    if isinstance(error, AgentFailedError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_server = isinstance(status, int) and status >= 500
    is_server |= isinstance(error.__cause__ or error, httpx.TransportError)
    return AgentFailedError(own_error(error), "server" if is_server else "exception")


class RetryingTransport(httpx.AsyncBaseTransport):
    """A transport of agents' HTTP clients that sends a request again while the gateway is away.

    All attempts have the same mark, by which the gateway knows them from another request with the same body.

    The client of OpenAI's package gives up after three attempts and two seconds, in which no gateway restarts. An
    answer is passed on once it is whole.
    """

    def __init__(self, seconds: float, waits: Stopwatch) -> None:
        """Make a transport that gives up ``seconds`` after a request's first attempt; ``waits`` runs meanwhile."""
        self._pools: dict[tuple[str, bytes], httpx.AsyncHTTPTransport] = {}
        """The connections by scheme and authority, because an agent may also ask others than the gateway."""
        self._seconds = seconds
        self._waits = waits
        self.is_lost = False
        """True once a request was given up."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a request; without one in time, the last one, or raise the last error."""
        request.headers[REQUEST_MARK] = uuid.uuid4().hex
        end, pause = time.monotonic() + self._seconds, FIRST_PAUSE_SECONDS
        with self._waits.running():
            while True:
                may_repeat = isinstance(request.stream, httpx.ByteStream) and time.monotonic() < end
                try:
                    response = await self._whole(request)
                    if response.status_code not in _UNREACHABLE or not may_repeat:
                        self.is_lost |= response.status_code in _UNREACHABLE
                        return response
                except _LOST:
                    if not may_repeat:
                        self.is_lost = True
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            await pool.aclose()

    async def _whole(self, request: httpx.Request) -> httpx.Response:
        server = (request.url.scheme, request.url.netloc)
        if server not in self._pools:
            self._pools[server] = pool_for(str(request.url), None)
        response = await self._pools[server].handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            body = b"".join([part async for part in response.stream])
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(body))
