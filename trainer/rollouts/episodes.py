"""From a prompt to a group of episodes: an agent answers it through the gateway, which records the tokens."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
import uuid
from collections import Counter as Tally
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import httpx
from prometheus_client import Counter

from services.agents import EPISODES_AT_ONCE, Agent, AgentFailedError, Example, load_agent, play
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError, own_error
from services.core.logs import get_logger
from services.core.tasks import Stopwatch
from services.http.client import RequestRefusedError
from services.programs import programs_at_once
from services.protocol.base import derive_seed
from services.protocol.episodes import EpisodeFigures
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult, RewardStatus
from services.protocol.sessions import AGAIN, DEADLINE, REQUEST_MARK, CreateSessionRequest
from services.weights.policy_store import ADAPTER_NAME
from trainer.config import Rollout, TrainerSettings
from trainer.rollouts.clients import Clients
from trainer.rollouts.experiences import LOST_TOKENS, Episode, experiences_of
from trainer.rollouts.game import EnvironmentPlayer
from trainer.rollouts.groups import OWN_REASONS, GroupMaker

log = get_logger(__name__)

T = TypeVar("T")


EPISODES = Counter("trainer_episodes", "Episodes whose trace was received.")
TOKENS = Counter("trainer_episode_tokens", "Tokens sampled in the episodes' traces.")

NO_ENGINE = "no engine answered the last call within twice AGENT_SECONDS"
DELETE_SECONDS = 10.0
"""Longest wait for the deletion of a session, which the gateway makes up for."""

OVER_LIMIT = ("timeout", "limit")
"""Reasons of failure for which the model is at fault: the answer is wrong."""


def why_failed(episode: Episode | None) -> str | None:
    """Return the reason, as a metric's label, why an episode failed or is over a limit; None for any other."""
    if episode is None:
        return "gateway"
    if episode.failure is not None:
        return episode.failure.reason
    if episode.result.status is RewardStatus.OVER_LIMIT:
        return "reward_over_limit"
    return "no_reward" if episode.result.reward is None else None


class EpisodeMaker(GroupMaker):
    """The maker of groups whose answers are the episodes of an agent.

    An episode over a limit is a wrong answer, and a failed one has no reward. A prompt of which every episode failed is
    left out and counted.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        gateway: GatewayClient,
        rollouts: RolloutClient,
        rewards: RewardClient,
        answers: Agent | EnvironmentPlayer,
    ) -> None:
        """Make the maker; an agent ``answers`` prompts, or a player plays games of an environment."""
        super().__init__(settings, rollouts, rewards)
        self.gateway = gateway
        self.player = answers if isinstance(answers, EnvironmentPlayer) else None
        self.agent = None if isinstance(answers, EnvironmentPlayer) else answers
        self._failed: Tally[str] = Tally()
        """Failed episodes, by reason, of prompts that were left out since the last group."""
        self._examples: dict[str, str] = {}
        """By reason, what one of those episodes says."""
        self._gateway_error: DependencyLostError | RequestRefusedError | None = None
        at_once = programs_at_once() if settings.rollout is Rollout.PROGRAM else EPISODES_AT_ONCE
        self._places = asyncio.Semaphore(settings.agent_concurrency or at_once)
        # Each episode has an HTTP client of its own; loading the certificates takes longer than all the rest of it.
        self._certificates = httpx.create_ssl_context()

    async def sample_group(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Group | None:
        """Play ``n`` episodes and return their sequences as a group; None when every episode failed."""
        if self.player is None:
            requests = [self._request(prompt, params, seed, index) for index in range(n)]
            games = await asyncio.gather(*(self._answer(prompt, request) for request in requests))
        else:
            try:
                seats = await self.player.trained_seats(prompt)
            except RequestRefusedError as error:
                self.leave_out(prompt, AgentFailedError(str(error), "refused"))
                return None
            except (AgentFailedError, DependencyLostError) as error:
                self.leave_out(prompt, error)
                return None
            requests = [self._request(prompt, params, seed, index) for index in range(n * len(seats))]
            tables = (requests[i : i + len(seats)] for i in range(0, len(requests), len(seats)))
            games = await asyncio.gather(*(self._game(self.player, prompt, table, seats) for table in tables))
        played = [episode for game in games for episode in game]
        self.last_generated = time.perf_counter()
        episodes = [episode for episode in played if episode is not None]
        self._count_failed(played)
        prompt_ids, experiences = experiences_of(episodes)
        if not experiences or not any(e.failure is None or e.is_over_limit for e in episodes):
            self.leave_out(prompt, self._why_failed(episodes))
            return None
        self.failed_in_a_row = 0
        told = {"episodes_failed": dict(self._failed), "failure_examples": self._examples}
        self._failed, self._examples = Tally(), {}
        names = set(EpisodeFigures.model_fields) - {"figures", "seat", "won"}
        figures = {
            e.trace.index: EpisodeFigures(
                **e.trace.model_dump(include=names), figures=e.figures, seat=e.seat, won=e.has_won
            )
            for e in episodes
        }
        group = self.group(prompt, prompt_ids, experiences)
        return group.model_copy(update={"episode_figures": figures, **told})

    def _count_failed(self, played: Sequence[Episode | None]) -> None:
        """Count the failed episodes by reason, and keep what one of each reason says."""
        for episode in played:
            if (reason := why_failed(episode)) is not None:
                self._failed[reason] += 1
                said = self._gateway_error if episode is None else episode.result.reason
                self._examples.setdefault(reason, str(said))

    def _request(self, prompt: Prompt, params: SamplingParams, seed: int, index: int) -> CreateSessionRequest:
        settings = self.settings
        group_id = f"{settings.run_id}-{prompt.epoch}-{prompt.position}"
        return CreateSessionRequest(
            # Another attempt at the same prompt, after a restart, must not continue this session.
            id=f"{group_id}-{index}-{uuid.uuid4().hex[:12]}",
            group_id=group_id,
            index=index,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=derive_seed(seed, index),
            max_turn_tokens=params.max_new_tokens,
            max_turns=settings.agent_max_turns,
            max_tokens=settings.agent_max_tokens,
            deadline_seconds=settings.longest_answer_seconds,
            lora_path=ADAPTER_NAME if settings.lora_rank else None,
        )

    async def _answer(self, prompt: Prompt, request: CreateSessionRequest) -> list[Episode | None]:
        """Let the agent play an episode."""
        assert self.agent is not None
        async with self._places:
            return [await self._episode(prompt, request, self.agent)]

    async def _game(
        self, player: EnvironmentPlayer, prompt: Prompt, requests: Sequence[CreateSessionRequest], seats: Sequence[int]
    ) -> list[Episode | None]:
        """Play a game; each of its ``seats`` that are trained is an episode with a session of its own."""
        has_others = await player.seats() > 1
        async with self._places, player.game(prompt, seats) as game:
            return await asyncio.gather(
                *(
                    self._episode(prompt, request, partial(game.answer, seat), seat if has_others else None)
                    for request, seat in zip(requests, seats, strict=True)
                )
            )

    def _why_failed(self, episodes: Sequence[Episode]) -> Exception:
        """Return the reason why no episode of a prompt is of use."""
        failures = [episode.failure for episode in episodes if episode.failure]
        if not episodes and self._gateway_error is not None:
            return self._gateway_error
        if not failures:
            return AgentFailedError("the agent never called the model")
        # Where one episode failed by a limit or a lost service, the user's code is not all that failed.
        return next((failure for failure in failures if failure.reason not in OWN_REASONS), failures[-1])

    async def _episode(
        self, prompt: Prompt, request: CreateSessionRequest, agent: Agent, seat: int | None = None
    ) -> Episode | None:
        """Play an episode; None, counted, if the gateway failed."""
        if await self._asked(self.gateway.create(request)) is None:
            return None
        scored: list[RewardResult] = []

        async def score(items: Sequence[RewardItem]) -> list[RewardResult]:
            scored[:] = await self.score(items)
            return scored

        example = Example(**dict(prompt), model=self.settings.model_name, scorer=score)
        result, failure = await self._play(agent, example, request.id)
        if result.status is RewardStatus.ERROR and any(result is one for one in scored):
            failure = AgentFailedError(str(result.reason), "reward_error")
        session = await self._asked(self.gateway.reward(request.id, result.reward, result.reason))
        if session is None:
            return None
        if session.refused == DEADLINE and failure is None:
            failure = AgentFailedError(f"{NO_ENGINE}; the agent caught that and returned {result.reward}", "server")
            result = RewardResult(reward=None, status=RewardStatus.ERROR, reason=str(failure))
        trace = await self._asked(self.gateway.finish(request.id))
        if trace is None:
            return None
        await self._delete(request.id)
        EPISODES.inc()
        TOKENS.inc(trace.sampled_tokens)
        for reason, count in trace.lost_tokens.items():
            LOST_TOKENS.labels(reason).inc(count)
        episode = _judged(Episode(trace, result, failure, example.turn_rewards, example.figures, seat))
        if episode.failure is not None and episode.failure.reason in OWN_REASONS:
            self.tell(episode.failure.reason, str(episode.failure))
        return episode

    async def _delete(self, session_id: str) -> None:
        """Delete a session whose trace was received; where that fails, the gateway does it after the deadline."""
        try:
            await self.gateway.delete(session_id, deadline=DELETE_SECONDS)
        except (DependencyLostError, RequestRefusedError) as error:
            log.warning("session not deleted", session=session_id, reason=str(error))

    async def _asked(self, reply: Awaitable[T]) -> T | None:
        try:
            return await reply
        except (DependencyLostError, RequestRefusedError) as error:
            self._gateway_error = error
            return None

    async def _play(
        self, agent: Agent, example: Example, session_id: str
    ) -> tuple[RewardResult, AgentFailedError | None]:
        """Let the agent play, and return the result of the episode, with the agent's error if it failed.

        Raises:
            DependencyLostError: the reward-server was lost.
        """
        seconds = self.settings.agent_seconds
        transport = PatientTransport(self._certificates, self.settings.service_deadline_seconds, example.waits)

        async def waited() -> float:
            session = await self._asked(self.gateway.session(session_id))
            if session is None:
                raise AgentFailedError(str(self._gateway_error), "server")
            # An agent may ask the gateway by a client of its own.
            return max(example.waits.seconds, session.waited_seconds)

        try:
            timeout = self.settings.longest_answer_seconds
            async with httpx.AsyncClient(transport=transport, timeout=timeout) as http_client:
                reward = await play(
                    agent,
                    example,
                    seconds,
                    base_url=self.gateway.agent_url(session_id),
                    api_key=session_id,
                    http_client=http_client,
                    waited=waited,
                )
        except DependencyLostError:
            raise
        # An agent may raise anything, and one failed episode must not end the others.
        except Exception as error:  # noqa: BLE001
            failure = as_failure(error)
            if failure.reason in ("exception", "timeout"):
                failure = await self._told_by_gateway(failure, session_id)
            if failure.reason == "exception" and transport.is_lost:
                failure.reason = "server"
            log.info("episode failed", session=session_id, reason=str(failure))
            status = RewardStatus.OVER_LIMIT if failure.reason in OVER_LIMIT else RewardStatus.ERROR
            return RewardResult(reward=None, status=status, reason=str(failure)), failure
        return example.result_of(reward), None

    async def _told_by_gateway(self, failure: AgentFailedError, session_id: str) -> AgentFailedError:
        """Return the failure as the gateway knows it, which an agent's own error may not tell."""
        try:
            session = await self.gateway.session(session_id)
        except (DependencyLostError, RequestRefusedError):
            return failure
        if session.refused == DEADLINE:
            return AgentFailedError(f"{NO_ENGINE}: {failure}", "server")
        if failure.reason == "exception" and session.refused is not None:
            failure.reason = "limit"
        if failure.reason == "timeout" and not session.called:
            return AgentFailedError(
                f"the agent made no call within AGENT_SECONDS={self.settings.agent_seconds:g}; raise it, or see where "
                "the agent waits",
                "no_call",
            )
        return failure

    def all_failed(self) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when no prompt got an episode."""
        failure, prompts = self.last_failure, f"{self.failed_in_a_row} prompt{'s'[: self.failed_in_a_row != 1]}"
        reason = f"every episode of {prompts} in a row failed: {failure}"
        if isinstance(failure, DependencyLostError) or (
            isinstance(failure, AgentFailedError) and failure.reason in ("server", "lost")
        ):
            return DependencyLostError(reason)
        if self.settings.rollout is Rollout.ENVIRONMENT:
            return ConfigurationError(f"{reason}; see the logs of environment-server and gateway")
        option = f"--agent {self.settings.agent}" if self.settings.agent else "--agent-command"
        return ConfigurationError(
            f"{reason}; if it asks for chat completions, `grpo evaluate {option} --check` plays one episode"
        )


def group_maker(settings: TrainerSettings, clients: Clients) -> GroupMaker:
    """Return the maker of groups that ROLLOUT names.

    Raises:
        ConfigurationError: AGENT cannot be imported.
    """
    if clients.gateway is None:
        return GroupMaker(settings, clients.rollouts, clients.rewards)
    answers: Agent | EnvironmentPlayer
    if clients.environments is not None:
        answers = EnvironmentPlayer(clients.environments, clients.opponent)
    else:
        answers = clients.relay or load_agent("AGENT", settings.agent)
    return EpisodeMaker(settings, clients.gateway, clients.rollouts, clients.rewards, answers)


def _judged(episode: Episode) -> Episode:
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


FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
_AWAY = frozenset({502, 503, 504})
_LOST = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)


class PatientTransport(httpx.AsyncHTTPTransport):
    """A transport that sends a request again while nobody answers it.

    All attempts have the same mark, by which the gateway knows them from another request with the same body.

    The client of OpenAI's package gives up after three attempts and two seconds, in which no gateway restarts. An
    answer is passed on once it is whole.
    """

    def __init__(self, certificates: ssl.SSLContext, seconds: float, waits: Stopwatch) -> None:
        """Make a transport that gives up ``seconds`` after a request's first attempt; ``waits`` runs meanwhile."""
        super().__init__(verify=certificates, trust_env=False)
        self._seconds = seconds
        self._waits = waits
        self.is_lost = False
        """True once a request was given up."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a request; without one in time, the last one, or raise the last error."""
        with self._waits.running():
            return await self._answer(request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        mark = request.headers[REQUEST_MARK] = uuid.uuid4().hex
        end, pause = time.monotonic() + self._seconds, FIRST_PAUSE_SECONDS
        while True:
            may_repeat = isinstance(request.stream, httpx.ByteStream) and time.monotonic() < end
            try:
                response = await self._whole(request)
            except _LOST:
                if not may_repeat:
                    self.is_lost = True
                    raise
            else:
                if response.status_code not in _AWAY or not may_repeat:
                    self.is_lost |= response.status_code in _AWAY
                    return response
            request.headers[REQUEST_MARK] = mark + AGAIN
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _whole(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            body = b"".join([part async for part in response.stream])
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(body))
