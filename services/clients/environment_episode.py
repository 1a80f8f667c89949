"""An episode on an environment-server that goes on at another server when its server is lost."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, Self

import orjson
from prometheus_client import Counter

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.protocol.evaluation import (
    Action,
    EnvironmentInfo,
    EpisodeStart,
    OngoingEpisode,
    ResetReply,
    StepItem,
    StepResult,
    StepStatus,
)

if TYPE_CHECKING:
    from services.clients.environment import EnvironmentClient, EnvironmentServer

log = get_logger(__name__)

REPLAYED = Counter("client_episodes_replayed", "Episodes whose server was lost and whose actions were taken again.")

CLOSE_SECONDS = 5.0
"""Longest wait for the end of an episode, which the server ends by itself when nobody steps it."""
MOST_LOSSES = 3
"""An action at which the episode was lost so often in a row is the cause."""


class EpisodeLostError(Exception):
    """An episode that cannot go on; the message says why. It has no return, which is not a return of 0."""


class EnvironmentFailedError(EpisodeLostError):
    """An episode whose environment failed by itself, and may do so again."""


class Episode(OngoingEpisode):
    """An episode on a server. ``environment`` is its environment and the form of its states and actions.

    It keeps its seed, its actions, and a digest of every state. If its server is lost, it begins again at any server,
    with the same seed and actions, and goes on if every state is the same. ``end`` must be called when it is over;
    ``async with`` does.
    """

    def __init__(
        self, client: EnvironmentClient, server: EnvironmentServer, reply: ResetReply, split: str | None
    ) -> None:
        [start] = reply.episodes
        super().__init__(start.episode, start.seed, start.state, seat=start.seat or 0)
        self.environment: EnvironmentInfo = reply.environment
        self.status = StepStatus.RUNNING
        self._client = client
        self._server = server
        self._split = split
        self._actions: list[Action] = []
        self._digests = [_digest(start)]
        client.count(server, 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def is_over(self) -> bool:
        """True once the environment has ended the episode."""
        return self.status in (StepStatus.TERMINATED, StepStatus.TRUNCATED)

    async def step(self, action: Action) -> StepResult:
        """Take an action and move on to the state after it. A refused action changes nothing.

        Raises:
            EnvironmentFailedError: the environment failed, and did so again if it is deterministic.
            EpisodeLostError: the server was lost, and the episode cannot go on elsewhere.
            RequestRefusedError: the environment cannot begin the episode again.
        """
        reason, kind = "", EpisodeLostError
        for _ in range(MOST_LOSSES):
            try:
                result = await self._client.step(self._server, self.step_with(action))
            except DependencyLostError as error:
                reason, kind = str(error), EpisodeLostError
            else:
                if result.status is not StepStatus.LOST:
                    self._take(action, result)
                    return result
                reason = f"{self._server.url}: {result.detail}"
                kind = EnvironmentFailedError if result.environment_failed else EpisodeLostError
                if result.environment_failed and not self.environment.deterministic:
                    raise kind(reason)
            await self._begin_again(reason)
        raise kind(f"{reason}; the episode was lost {MOST_LOSSES} times at this action")

    async def end(self) -> None:
        """End the episode on its server, if the environment has not ended it."""
        self._client.count(self._server, -1)
        if not self.is_over:
            try:
                await self._server.end([self.episode], deadline=CLOSE_SECONDS)
            except DependencyLostError:
                return  # The server ends an episode that nobody steps.

    def _take(self, action: Action, result: StepResult) -> None:
        if result.status is StepStatus.REFUSED:
            return
        self.follow(result)
        self.status = result.status
        self._actions.append(action)
        self._digests.append(_digest(result))

    async def _begin_again(self, reason: str) -> None:
        """Begin the episode on any server and take its actions again, until a server has taken them all.

        Raises:
            EpisodeLostError: the environment is not deterministic, or no server has taken all actions in time.
        """
        if not self.environment.deterministic:
            raise EpisodeLostError(f"{reason}; {self.environment.id} does not declare that it is deterministic")
        log.info("episode begins again", seed=self.seed, actions=len(self._actions), reason=reason)
        end = time.monotonic() + self._client.deadline
        while time.monotonic() < end:
            try:
                server, reply = await self._client.reset(self.seed, self._split)
            except DependencyLostError as error:
                raise EpisodeLostError(f"{reason}; then {error}") from error
            self._client.count(self._server, -1)
            self._client.count(server, 1)
            self._server, [start] = server, reply.episodes
            self.episode = start.episode
            self._compare(start, 0)
            if await self._repeat():
                REPLAYED.inc()
                return
        raise EpisodeLostError(f"{reason}; no server took its actions again within {self._client.deadline:g} s")

    async def _repeat(self) -> bool:
        """Take all actions again; return False if the server is lost meanwhile.

        Raises:
            EpisodeLostError: a state is another one than before.
        """
        for step, action in enumerate(self._actions):
            item = StepItem.model_construct(episode=self.episode, step=step, action=action)
            try:
                result = await self._client.step(self._server, item)
            except DependencyLostError:
                return False
            if result.status is StepStatus.LOST:
                return False
            self._compare(result, step + 1)
        return True

    def _compare(self, reached: EpisodeStart | StepResult, actions: int) -> None:
        if _digest(reached) != self._digests[actions]:
            raise EpisodeLostError(
                f"its server was lost, and {self._server.url} reached another state after {actions} actions; is "
                f"{self.environment.id} deterministic, as it declares?"
            )


def _digest(reached: EpisodeStart | StepResult) -> bytes:
    """Return a digest of a state with the reward and the status that came with it."""
    content: list[Any] = [reached.state, reached.seat]
    if isinstance(reached, StepResult):
        content += [reached.status, reached.reward, reached.rewards]
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
