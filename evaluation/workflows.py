"""The ways in which a prompt is answered: one completion, or an agent that talks to the model over several turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from evaluation.recording import ONLY_CHAT, Recording, RecordingTransport, other_api_of
from evaluation.samples import Kind, Sample
from evaluation.server import Server
from evaluation.settings import EvaluationSettings
from services.agents import Agent, AgentFailedError, Example, Score, play
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.base import derive_seed
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus

Messages = Sequence[dict[str, Any]]
NO_KEY = "none"
"""The API key where the servers ask for none, because OpenAI's client insists on one."""
NO_CALL = (
    "the agent answered without a call of the model that the evaluation could sample and record; give the http_client "
    "that the agent gets to its client, as in AsyncOpenAI(..., http_client=http_client); a program asks OPENAI_BASE_URL"
)


class ScoringLostError(Exception):
    """The reward-server does not answer: neither an inference server nor an agent is at fault."""


def seed_of(seed: int, prompt: Prompt, kind: Kind, index: int) -> int:
    """Return the 31-bit seed of a sample, the same on every machine and in a resumed evaluation."""
    return derive_seed(seed, kind.value, prompt.id, index)


@dataclass(frozen=True)
class SingleTurn:
    """One completion answers a prompt."""

    settings: EvaluationSettings
    at_once: int
    """The most samples of a prompt that are one piece of work."""

    async def sample(
        self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages = ()
    ) -> list[Sample]:
        """Return the completions that the server gave; there is no ``history``."""
        settings = self.settings
        temperature, top_p = (0.0, 1.0) if kind is Kind.GREEDY else (settings.temperature, settings.top_p)
        params = SamplingParams(settings.max_new_tokens, temperature, top_p, stop=settings.eval_stop)
        seed = seed_of(settings.seed, prompt, kind, indices[0])
        started = time.monotonic()
        answers = await server.complete(prompt, params, len(indices), seed)
        seconds = time.monotonic() - started
        return [
            Sample.of(
                prompt,
                kind,
                index,
                completion=answer.text,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                policy_version=answer.policy_version,
                server=server.url,
                seconds=seconds,
            )
            for index, answer in zip(indices, answers, strict=False)
        ]


@dataclass(frozen=True)
class AgentWorkflow:
    """Episodes of an agent, which gets the example, ``base_url``, ``api_key`` and ``http_client``.

    It returns a reward, or None for an answer that cannot be scored.
    """

    agent: Agent
    settings: EvaluationSettings
    score: Score
    model: str
    """The model's name in requests."""
    places: asyncio.Semaphore
    """Bounds the episodes at once, whatever the number of servers."""
    at_once: ClassVar[int] = 1
    """The most samples of a prompt that are one piece of work."""

    async def sample(
        self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages = ()
    ) -> list[Sample]:
        """Play one episode for each index, one after the other; each one's conversation continues ``history``."""
        samples = []
        for index in indices:
            async with self.places:
                samples.append(await self._episode(server, prompt, kind, index, history))
        return samples

    async def _episode(self, server: Server, prompt: Prompt, kind: Kind, index: int, history: Messages) -> Sample:
        settings, recording = self.settings, Recording()
        forced: dict[str, Any] = {"temperature": 0.0}
        seed = None
        if kind is Kind.SAMPLED:
            forced = {"temperature": settings.temperature, "top_p": settings.top_p}
            seed = seed_of(settings.seed, prompt, kind, index) if server.takes_seeds else None
        forced |= server.forced
        example = Example(**dict(prompt), model=self.model, history=list(history), scorer=self.score)
        transport = RecordingTransport(server.http, settings, forced, seed, recording, example.waits, server.limit_name)
        started = time.monotonic()
        async with httpx.AsyncClient(transport=transport, timeout=server.http.timeout) as http_client:
            reward = await self._reward(server, example, http_client, recording)
        if recording.messages and len(recording.messages) <= len(history):
            raise AgentFailedError("its conversation lacks the session's earlier questions: begin with example.history")
        return Sample.of(
            prompt,
            kind,
            index,
            completion=recording.last_text,
            finish_reason=FinishReason.LENGTH if recording.is_truncated else FinishReason.STOP,
            prompt_tokens=recording.prompt_tokens,
            completion_tokens=recording.completion_tokens,
            turns=recording.turns,
            tool_calls=recording.tool_calls,
            messages=recording.messages,
            server=server.url,
            seconds=time.monotonic() - started,
            result=example.result_of(reward),
        )

    async def _reward(
        self, server: Server, example: Example, http_client: httpx.AsyncClient, recording: Recording
    ) -> float | None:
        """Run the agent and return its reward; None, as in training, if its turns went over a limit of the episode.

        Raises:
            DependencyLostError: the server failed at the last call, so the episode is worth another try.
            AgentFailedError: the agent failed, or made no call that was recorded.
            ConfigurationError: the agent speaks another API than chat completions.
        """
        error: Exception | None = None
        try:
            reward = await play(
                self.agent,
                example,
                self.settings.agent_seconds,
                base_url=server.api_url,
                api_key=server.token or NO_KEY,
                http_client=http_client,
            )
        except (DependencyLostError, ScoringLostError):
            raise
        # An agent's library may raise anything, and one failed episode must not end the others.
        except Exception as caught:  # noqa: BLE001
            error = caught
        if not recording.turns and (path := recording.other_api or other_api_of(error)):
            raise ConfigurationError(f"the agent asked {path}: {ONLY_CHAT}") from error
        if error is None and not recording.turns:
            raise AgentFailedError(NO_CALL, "no_call")
        is_late = getattr(error, "reason", None) == "timeout"
        if recording.server_error is not None and (error is None or is_late):
            raise DependencyLostError(f"{server.api_url}: {recording.server_error}") from error
        if error is None:
            return reward
        if recording.turns and (recording.refused or is_late):
            example.result = RewardResult(reward=None, status=RewardStatus.OVER_LIMIT, reason=str(error))
            return None
        if isinstance(error, AgentFailedError):
            raise error
        if recording.server_error is not None:
            raise DependencyLostError(f"{server.api_url}: {recording.server_error}") from error
        raise AgentFailedError(f"{type(error).__name__}: {error}") from error


Workflow = SingleTurn | AgentWorkflow
