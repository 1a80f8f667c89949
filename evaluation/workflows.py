"""How an answer comes about: one completion of the prompt, or an agent that talks to the model over several turns."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from evaluation.recording import Recording, RecordingTransport
from evaluation.samples import Kind, Sample
from evaluation.servers import Server
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.extras import install_command
from services.protocol import Completion, FinishReason, Message, Prompt, RewardItem, RewardResult, RewardStatus

NO_KEY = "none"
"""Sent as the API key where the servers ask for none: OpenAI's client insists on one."""

AGENT_PACKAGES = ("agents", "openai")
"""The packages of the extra ``evaluation`` that agents import."""

Score = Callable[[Sequence[RewardItem]], Awaitable[list[RewardResult]]]


class ScoringLostError(Exception):
    """The reward-server does not answer: no fault of an inference server, nor of an agent."""


class AgentFailedError(Exception):
    """An agent raised; the message says what."""


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn; greedy completions are beside them."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    def params(self, kind: Kind) -> SamplingParams:
        """For /generate."""
        if kind is Kind.GREEDY:
            return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=0.0)
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p)

    def openai(self, kind: Kind, seed: int) -> dict[str, Any]:
        """For /v1/chat/completions."""
        if kind is Kind.GREEDY:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": seed}

    def seed_of(self, prompt: Prompt, kind: Kind, index: int) -> int:
        """A 31-bit seed, the same on every machine and in a resumed evaluation."""
        text = f"{self.seed}/{kind.value}/{prompt.id}/{index}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


class Workflow(Protocol):
    """Makes samples of a prompt."""

    one_by_one: bool
    """Whether the samples of a prompt are separate pieces of work."""

    async def sample(self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """Samples with these numbers; perhaps not all, and perhaps not scored yet."""
        ...


class SingleTurn:
    """One request for all completions of a prompt, which the engine reads once."""

    one_by_one = False

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    async def sample(self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """The completions that could be had."""
        started = time.monotonic()
        completions = await server.rollouts.generate(
            prompt.prompt_ids,
            self._sampling.params(kind),
            n=len(indices),
            seed=self._sampling.seed_of(prompt, kind, indices[0]),
        )
        seconds = time.monotonic() - started
        return [
            _sample(prompt, kind, index, completion, server.url, seconds)
            for index, completion in zip(indices, completions, strict=False)
        ]


def _sample(prompt: Prompt, kind: Kind, index: int, completion: Completion, server: str, seconds: float) -> Sample:
    return Sample(
        prompt_id=prompt.id,
        kind=kind,
        index=index,
        category=prompt.category,
        prompt=prompt.prompt,
        ground_truth=prompt.ground_truth,
        completion=completion.completion,
        finish_reason=completion.finish_reason,
        prompt_tokens=len(prompt.prompt_ids),
        completion_tokens=len(completion.completion_ids),
        policy_version=completion.oldest_version if completion.policy_versions else None,
        server=server,
        seconds=seconds,
    )


@dataclass
class Example:
    """What an agent is to solve."""

    id: str
    prompt: str
    """The user's turn, with the instruction on how to give the answer."""
    messages: list[Message]
    """The whole conversation up to the answer: a system turn and solved examples where there are any."""
    ground_truth: str
    category: str | None
    model: str
    """What to call the model in requests."""
    scorer: Score = field(repr=False)
    result: RewardResult | None = None
    """What the last call of ``score`` said."""

    async def score(self, response: str) -> float | None:
        """The reward of a response by the reward functions of the evaluation; None where it cannot be scored."""
        item = RewardItem(prompt=self.prompt, response=response, ground_truth=self.ground_truth)
        [self.result] = await self.scorer([item])
        return self.result.reward


Agent = Callable[..., Awaitable[float | None]]


class AgentWorkflow:
    """An agent's episodes: a callable gets the example, ``base_url``, ``api_key`` and ``http_client``, and returns a
    reward, or None for an answer that cannot be scored.
    """

    one_by_one = True

    def __init__(
        self, agent: Agent, sampling: Sampling, score: Score, *, model: str, token: str | None, seconds: float
    ) -> None:
        self._agent = agent
        self._sampling = sampling
        self._score = score
        self._model = model
        self._api_key = token or NO_KEY
        self._seconds = seconds

    async def sample(self, server: Server, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """One episode an index, one after the other."""
        return [await self._episode(server, prompt, kind, index) for index in indices]

    async def _episode(self, server: Server, prompt: Prompt, kind: Kind, index: int) -> Sample:
        recording = Recording()
        forced = self._sampling.openai(kind, self._sampling.seed_of(prompt, kind, index))
        transport = RecordingTransport(server.http, forced, self._sampling.max_new_tokens, recording)
        example = Example(
            id=prompt.id,
            prompt=prompt.prompt,
            messages=prompt.messages,
            ground_truth=prompt.ground_truth,
            category=prompt.category,
            model=self._model,
            scorer=self._score,
        )
        started = time.monotonic()
        async with httpx.AsyncClient(transport=transport, timeout=server.http.timeout) as http_client:
            reward = await self._play(example, f"{server.url}/v1", http_client, recording)
        return Sample(
            prompt_id=prompt.id,
            kind=kind,
            index=index,
            category=prompt.category,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
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

    async def _play(
        self, example: Example, base_url: str, http_client: httpx.AsyncClient, recording: Recording
    ) -> float | None:
        """The agent's reward.

        Raises:
            DependencyLostError: the server failed, so that the episode is worth another try.
            AgentFailedError: the agent itself did, or took too long.
        """
        try:
            async with asyncio.timeout(self._seconds):
                reward = await self._agent(example, base_url=base_url, api_key=self._api_key, http_client=http_client)
        except TimeoutError as error:
            raise AgentFailedError(f"the agent took more than {self._seconds:g} s") from error
        except (DependencyLostError, ScoringLostError):
            raise
        # Whatever an agent's library raises: one failed episode must not end the others.
        except Exception as error:
            if recording.lost is not None:
                raise DependencyLostError(f"{base_url}: {recording.lost}") from error
            raise AgentFailedError(f"{type(error).__name__}: {error}") from error
        if reward is None:
            return None
        if isinstance(reward, bool | int | float) and math.isfinite(reward):
            return float(reward)
        raise AgentFailedError(f"the agent returned {reward!r}; allowed is a finite number, or None")


def _result(example: Example, reward: float | None) -> RewardResult:
    """The agent's reward, with what the verifier said where it was asked and agrees."""
    if example.result is not None and example.result.reward == reward:
        return example.result
    if reward is None:
        return RewardResult(reward=None, status=RewardStatus.ERROR, reason="the agent gave no reward")
    return RewardResult(reward=reward, extracted=example.result.extracted if example.result else None)


def load_agent(name: str) -> Agent:
    """The callable ``module:function``; modules are also looked for in the current directory.

    Raises:
        ConfigurationError: there is none of that name.
    """
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise ConfigurationError(f"--agent {name!r}: give it as module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if error.name in AGENT_PACKAGES:
            raise ConfigurationError(f"--agent {name!r}: {error}; run: {install_command('evaluation')}") from error
        raise ConfigurationError(f"--agent {name!r}: {error}; is the module installed, or in {here}?") from error
    agent: Agent | None = getattr(module, function, None)
    if not callable(agent):
        raise ConfigurationError(f"--agent {name!r}: {module_name} has no function {function!r}")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigurationError(f"--agent {name!r} is no `async def`; it must be, since many episodes run at once")
    return agent
