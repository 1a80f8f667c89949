"""The ways in which a prompt is answered: one completion, or an agent that talks to the model over several turns."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import ConfigDict, Field

from evaluation import servers
from evaluation.recording import Recording, RecordingTransport
from evaluation.samples import Kind, Sample
from evaluation.servers import Server
from evaluation.settings import EvaluationSettings
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.extras import install_command
from services.core.seeds import derive_seed
from services.protocol.groups import FinishReason, RewardResult, RewardStatus
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem

NO_KEY = "none"
"""The API key where the servers ask for none, because OpenAI's client insists on one."""

Score = Callable[[Sequence[RewardItem]], Awaitable[list[RewardResult]]]


class ScoringLostError(Exception):
    """The reward-server does not answer: neither an inference server nor an agent is at fault."""


class AgentFailedError(Exception):
    """An agent raised an error, which the message names."""


def seed_of(seed: int, prompt: Prompt, kind: Kind, index: int) -> int:
    """Return the 31-bit seed of a sample, the same on every machine and in a resumed evaluation."""
    return derive_seed(seed, kind.value, prompt.id, index)


@dataclass(frozen=True)
class SingleTurn:
    """One request for all completions of a prompt, so that the engine computes the prompt once."""

    settings: EvaluationSettings
    at_once: ClassVar[int] = 1024
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """Return the completions that the server gave."""
        settings = self.settings
        params = SamplingParams(settings.max_new_tokens, settings.temperature, settings.top_p)
        if kind is Kind.GREEDY:
            params = SamplingParams(settings.max_new_tokens, temperature=0.0)
        seed = seed_of(settings.seed, prompt, kind, indices[0])
        started = time.monotonic()
        completions = await server.rollouts.generate(prompt.prompt_ids, params, n=len(indices), seed=seed)
        seconds = time.monotonic() - started
        return [
            Sample.of(
                prompt,
                kind,
                index,
                completion=completion.completion,
                finish_reason=completion.finish_reason,
                prompt_tokens=len(prompt.prompt_ids),
                completion_tokens=len(completion.completion_ids),
                policy_version=completion.oldest_version if completion.policy_versions else None,
                server=server.url,
                seconds=seconds,
            )
            for index, completion in zip(indices, completions, strict=False)
        ]


class Example(Prompt):
    """A prompt as an agent gets it.

    ``prompt`` is the user's turn, with the instruction on how to give the answer. ``messages`` is the whole
    conversation before the answer: the system turn and solved examples, where there are any.
    """

    model_config = ConfigDict(frozen=False)

    model: str
    """The model's name in requests."""
    scorer: Score = Field(repr=False, exclude=True)
    result: RewardResult | None = None
    """The result of the last call of ``score``."""

    async def score(self, response: str) -> float | None:
        """Return the reward of ``response`` by the evaluation's reward functions; None if it cannot be scored."""
        item = RewardItem(prompt=self.prompt, response=response, ground_truth=self.ground_truth)
        [self.result] = await self.scorer([item])
        return self.result.reward


Agent = Callable[..., Awaitable[float | None]]


@dataclass(frozen=True)
class AgentWorkflow:
    """Episodes of an agent: an ``async def`` that gets the example, ``base_url``, ``api_key`` and ``http_client``.

    It returns a reward, or None for an answer that cannot be scored.
    """

    agent: Agent
    settings: EvaluationSettings
    score: Score
    model: str
    """The model's name in requests."""
    at_once: ClassVar[int] = 1
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """Play one episode for each index, one after the other."""
        return [await self._episode(server, prompt, kind, index) for index in indices]

    async def _episode(self, server: Server, prompt: Prompt, kind: Kind, index: int) -> Sample:
        settings, recording = self.settings, Recording()
        forced: dict[str, Any] = {"temperature": 0.0}
        if kind is Kind.SAMPLED:
            seed = seed_of(settings.seed, prompt, kind, index)
            forced = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": seed}
        if server.adapter is not None:
            forced["lora_path"] = server.adapter
        transport = RecordingTransport(server.http, forced, settings.max_new_tokens, recording)
        example = Example(**dict(prompt), model=self.model, scorer=self.score)
        started = time.monotonic()
        async with httpx.AsyncClient(transport=transport, timeout=server.http.timeout) as http_client:
            reward = await self._reward(example, f"{server.url}/v1", http_client, recording)
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
            result=_result(example, reward),
        )

    async def _reward(
        self, example: Example, base_url: str, http_client: httpx.AsyncClient, recording: Recording
    ) -> float | None:
        """Run the agent and return its reward.

        Raises:
            DependencyLostError: the server failed, so the episode is worth another try.
            AgentFailedError: the agent failed, or took too long.
        """
        try:
            async with asyncio.timeout(servers.PROMPT_SECONDS):
                key = self.settings.token or NO_KEY
                reward = await self.agent(example, base_url=base_url, api_key=key, http_client=http_client)
        except TimeoutError as error:
            raise AgentFailedError(f"the agent took more than {servers.PROMPT_SECONDS:g} s") from error
        except (DependencyLostError, ScoringLostError):
            raise
        # An agent's library may raise anything, and one failed episode must not end the others.
        except Exception as error:
            if recording.server_error is not None:
                raise DependencyLostError(f"{base_url}: {recording.server_error}") from error
            raise AgentFailedError(f"{type(error).__name__}: {error}") from error
        if reward is None:
            return None
        if isinstance(reward, bool | int | float) and math.isfinite(reward):
            return float(reward)
        raise AgentFailedError(f"the agent returned {reward!r}; allowed is a finite number, or None")


def _result(example: Example, reward: float | None) -> RewardResult:
    """Return the agent's reward, with the verifier's result if the agent asked for it and returned its reward."""
    if example.result is not None and example.result.reward == reward:
        return example.result
    if reward is None:
        return RewardResult(reward=None, status=RewardStatus.ERROR, reason="the agent gave no reward")
    return RewardResult(reward=reward, extracted=example.result.extracted if example.result else None)


Workflow = SingleTurn | AgentWorkflow


def load_agent(name: str) -> Agent:
    """Import the agent ``module:function``; the current directory is on the path, too.

    Raises:
        ConfigurationError: the module or its function does not exist, or the function is no ``async def``.
    """
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        agent: Agent = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"--agent {name!r} cannot be imported: {error}; give it as module:function, with the module in {here} or "
            f"installed; if its library is missing, run: {install_command('evaluation')}"
        ) from error
    if not inspect.iscoroutinefunction(agent):
        raise ConfigurationError(f"--agent {name!r} is no `async def`; it must be, since many episodes run at once")
    return agent
