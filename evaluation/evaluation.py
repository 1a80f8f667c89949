"""The evaluation of one model: generates what is missing for every prompt, has it scored, and stores it at once.

A workflow is the way in which a prompt is answered: one completion, or an agent that talks to the model over several
turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from evaluation.pool import ServerPool
from evaluation.recording import ONLY_CHAT, Recording, RecordingTransport, other_api_of
from evaluation.samples import Kind, Sample, SampleStore
from evaluation.server import Server
from evaluation.settings import EvaluationSettings
from services.agents import Agent, AgentFailedError, Example, Score, play
from services.clients.reward import RewardClient
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import RequestRefusedError
from services.protocol.base import derive_seed
from services.protocol.pass_at_k import is_correct
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardItem, RewardResult, RewardStatus

Messages = Sequence[dict[str, Any]]
WINDOW = 4096
"""Pieces of work begun at once; the pool bounds how many of them are at the servers."""
SCORE_TRIES = 3
SCORE_PAUSE_SECONDS = 1.0
HOPELESS_FAILURES = 20
"""After this many failures without a single success, the evaluation gives up."""
LEFT_OUT = {RequestRefusedError: "refused", AgentFailedError: "agent failed", DependencyLostError: "lost"}
"""The reason, in reports, of samples that an error of this type prevents."""
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


async def score(rewards: RewardClient, items: Sequence[RewardItem]) -> list[RewardResult]:
    """Return one result an item, in order; items that the service failed to score are sent again a few times.

    Raises:
        ScoringLostError: the reward-server does not answer within the client's deadline.
    """
    try:
        results = await rewards.score(items)
        for _ in range(SCORE_TRIES - 1):
            again = [i for i, result in enumerate(results) if is_correct(result) is None]
            if not again:
                break
            await asyncio.sleep(SCORE_PAUSE_SECONDS)
            for i, result in zip(again, await rewards.score([items[i] for i in again]), strict=True):
                results[i] = result
    except DependencyLostError as error:
        raise ScoringLostError(str(error)) from error
    return results


@dataclass
class Progress:
    """The progress of an evaluation."""

    total: int = 0
    done: int = 0
    """Samples in the store, those of earlier attempts included."""
    fresh: int = 0
    """Samples that this process added."""
    tokens: int = 0
    """Completion tokens of the fresh samples."""
    greedy: int = 0
    """Judged greedy samples."""
    correct: int = 0
    """Right answers among them."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that could not be obtained, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first failure's message, by reason."""
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def throughput(self) -> dict[str, int | float | None]:
        """The throughput of this process only; the samples of earlier attempts are counted apart."""
        seconds = self.seconds
        return {
            "seconds": seconds,
            "samples": self.fresh,
            "samples_resumed": self.done - self.fresh,
            "samples_per_second": self.fresh / seconds if self.fresh else None,
            "completion_tokens_per_second": self.tokens / seconds if self.fresh else None,
        }

    def judge(self, samples: Sequence[Sample]) -> None:
        """Count the judged greedy samples and the right ones among them."""
        judged = [s.is_correct for s in samples if s.kind is Kind.GREEDY and s.is_correct is not None]
        self.greedy += len(judged)
        self.correct += sum(judged)


@dataclass
class Evaluation:
    """The evaluation of one model, which continues from the samples in its store."""

    prompts: Sequence[Prompt]
    samples: int
    """Samples of each prompt, beside the greedy one."""
    workflow: Workflow
    pool: ServerPool
    score: Score
    store: SampleStore
    session_questions: int = 1
    """Prompts that an agent answers in one conversation."""
    progress: Progress = field(default_factory=Progress)

    async def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Generate and score the missing samples; ``watch`` is called after each piece of work.

        Raises:
            DependencyLostError: no server answers for long. Finished samples are kept.
            ScoringLostError: the reward-server does not answer.
            ConfigurationError: every prompt or episode fails.
        """
        keys = ((prompt.id, kind, i) for prompt, kind, indices in self._wanted() for i in indices)
        stored = [self.store.samples[key] for key in keys if key in self.store.samples]
        self.progress.total = len(self.prompts) * (1 + self.samples)
        self.progress.done = len(stored)
        self.progress.judge(stored)
        watch(self.progress)
        self.progress.judge(await self._store_scored([sample for sample in stored if sample.needs_score]))
        window = asyncio.Semaphore(WINDOW)

        async def do(session: Sequence[Prompt], kind: Kind, indices: Sequence[int]) -> None:
            try:
                async for _ in self._answer(session, kind, indices):
                    watch(self.progress)
            finally:
                window.release()

        try:
            async with asyncio.TaskGroup() as group:
                for session, kind, indices in self._missing():
                    await window.acquire()
                    group.create_task(do(session, kind, indices))
        except BaseExceptionGroup as errors:
            # All tasks fail for the same reason, so the first error is enough.
            raise errors.exceptions[0] from None

    def _wanted(self) -> Iterator[tuple[Prompt, Kind, range]]:
        """Yield the indices of the samples that an evaluation has of each prompt and kind."""
        for prompt in self.prompts:
            yield prompt, Kind.GREEDY, range(1)
            yield prompt, Kind.SAMPLED, range(self.samples)

    def _missing(self) -> Iterator[tuple[Sequence[Prompt], Kind, Sequence[int]]]:
        """Yield the sessions of which samples are not stored, in pieces of work."""
        for first in range(0, len(self.prompts), self.session_questions):
            session = self.prompts[first : first + self.session_questions]
            for kind, indices in ((Kind.GREEDY, range(1)), (Kind.SAMPLED, range(self.samples))):
                stored = self.store.samples
                missing = [i for i in indices if any((prompt.id, kind, i) not in stored for prompt in session)]
                for start in range(0, len(missing), self.workflow.at_once):
                    yield session, kind, missing[start : start + self.workflow.at_once]

    async def _answer(self, session: Sequence[Prompt], kind: Kind, indices: Sequence[int]) -> AsyncIterator[None]:
        """Answer the questions of a session in order; yield after each one.

        A later question's conversation continues that of the one before, which an earlier attempt may have stored.
        """
        history: Messages = ()
        for prompt in session:
            known = [self.store.samples.get((prompt.id, kind, index)) for index in indices]
            samples = [sample for sample in known if sample is not None]
            if len(samples) < len(indices):
                samples = await self._do(prompt, kind, indices, history)
            if samples and samples[-1].messages:
                history = samples[-1].messages
            yield

    async def _do(self, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages) -> list[Sample]:
        """Obtain, score and store samples of a prompt; return those that could be obtained."""
        try:
            samples = await self.pool.run(lambda server: self.workflow.sample(server, prompt, kind, indices, history))
        except (RequestRefusedError, AgentFailedError, DependencyLostError) as error:
            if isinstance(error, DependencyLostError) and not self.pool.alive:
                raise
            self._leave_out(prompt, LEFT_OUT[type(error)], str(error), len(indices))
            return []
        if missing := len(indices) - len(samples):
            self._leave_out(prompt, "missing", "the server gave fewer completions than asked for", missing)
        scored = await self._store_scored(samples)
        progress = self.progress
        progress.done += len(scored)
        progress.fresh += len(scored)
        progress.tokens += sum(sample.completion_tokens for sample in scored)
        progress.judge(scored)
        return scored

    async def _store_scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """Score the samples that need it, store all of them, and return them."""
        items = [
            RewardItem(
                prompt=sample.prompt,
                response=sample.completion,
                ground_truth=sample.ground_truth,
                completion_tokens=sample.completion_tokens,
                finish_reason=sample.finish_reason,
            )
            for sample in samples
            if sample.needs_score
        ]
        try:
            results = iter(await self.score(items) if items else [])
        except ScoringLostError:
            # The next attempt scores them.
            self.store.add(samples)
            raise
        scored = [s.model_copy(update={"result": next(results)}) if s.needs_score else s for s in samples]
        self.store.add(scored)
        return scored

    def _leave_out(self, prompt: Prompt, reason: str, detail: str, count: int) -> None:
        left_out = self.progress.left_out
        left_out[reason] += count
        self.progress.examples.setdefault(reason, f"{prompt.id}: {detail}")
        if not self.progress.done and left_out.total() >= min(HOPELESS_FAILURES, self.progress.total):
            raise ConfigurationError(
                f"nothing succeeds: {left_out.total()} samples {dict(left_out)}; {prompt.id}: {detail}"
            )
