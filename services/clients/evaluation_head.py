"""The client of the evaluation head."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from services.clients.play import Decision, Episode
from services.core.errors import DependencyLostError
from services.http.client import HttpClient
from services.protocol.evaluation import EpisodePosition, EvaluateReply, EvaluateRequest, FinishedEpisode, State


class EvaluationHeadClient(HttpClient):
    """Asks an evaluation head for actions. An async context manager, used within one event loop.

    Requests are repeated as every HttpClient does; a report of an episode that is repeated counts once.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: str | None = None,
        server: str | None = None,
        environment: str | None = None,
        token: str | None = None,
        deadline: float = 60.0,
    ) -> None:
        """Make a client.

        Args:
            url: the head's base URL, such as ``http://127.0.0.1:8080``.
            policy: the policy that acts; None for the head's first one.
            server: the name of this player on the dashboard, reserved for this client; None for ``anonymous``.
            environment: the environment that the dashboard shows for this player.
            token: the head's JOBGROUP_TOKEN.
            deadline: seconds that a request may take with all its attempts.
        """
        super().__init__(url, token=token, service="evaluation-head", timeout=deadline, deadline=deadline)
        self._about: dict[str, Any] = {
            "policy": policy,
            "server": server or "anonymous",
            "instance_key": server and secrets.token_hex(16),
            "environment": environment,
        }
        self._reports: list[FinishedEpisode] = []
        """Episodes that have ended since the last request of ``ask``."""

    async def act(
        self,
        states: Sequence[State] = (),
        *,
        episodes: Sequence[EpisodePosition] | None = None,
        finished: Sequence[FinishedEpisode] = (),
        logprobs: bool = False,
    ) -> EvaluateReply:
        """Return one action a state, in order, with the version that chose it; report episodes that have ended.

        Args:
            states: up to 4,096 states; none if there are only reports to send.
            episodes: the episode and step of each state, for the dashboard.
            finished: episodes that have ended since the last request.
            logprobs: ask for the actions' log-probabilities, which the reply then has if the policy gives them.

        Raises:
            RequestRefusedError: 404 no such policy, 409 the name belongs to another player, 422 a state does not fit.
            DependencyLostError: the head did not answer within the deadline, or the policy failed.
        """
        request = EvaluateRequest.model_construct(
            states=list(states),
            episodes=None if episodes is None else list(episodes),
            finished=list(finished),
            logprobs=logprobs,
            **self._about,
        )
        reply = await self.call("POST", "/evaluate", EvaluateReply, request)
        if len(reply.actions) != len(states):
            raise DependencyLostError(f"the head gave {len(reply.actions)} actions for {len(states)} states")
        return reply

    def report(self, episode: Episode) -> None:
        """Report the end of an episode with the next request of ``ask``."""
        self._reports.append(episode.report)

    async def ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Return a decision for each episode, and send the reports; raises as ``act`` does."""
        reports, self._reports = self._reports, []
        if not episodes and not reports:
            return []
        positions = [episode.position for episode in episodes]
        try:
            reply = await self.act([episode.state for episode in episodes], episodes=positions, finished=reports)
        except BaseException:
            # The next request repeats them; the head counts each once.
            self._reports += reports
            raise
        return list(map(Decision, reply.actions, reply.policy_versions))
