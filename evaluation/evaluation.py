"""The evaluation of one model: generates what is missing for every prompt, has it scored, and stores it at once.

A workflow is the way in which a prompt is answered: one completion, or an agent that talks to the model over several
turns.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evaluation.pool import ServerPool
from evaluation.samples import Kind, Sample, SampleStore
from evaluation.settings import EvaluationSettings
from services.agents import Agent, AgentFailedError
from services.clients.agent_episodes import Episode, EpisodePlayer, GatewayFailedError
from services.clients.player import Score
from services.clients.reward import RewardClient
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import RequestRefusedError
from services.protocol.base import derive_seed
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult
from services.protocol.sessions import CreateSessionRequest

Messages = Sequence[dict[str, Any]]
WINDOW = 4096
"""Pieces of work begun at once; pool and workflow bound how many of them are under way."""
SCORE_TRIES = 3
SCORE_PAUSE_SECONDS = 1.0
HOPELESS_FAILURES = 20
"""After this many failures without a single success, the evaluation gives up."""
LEFT_OUT = {RequestRefusedError: "refused", AgentFailedError: "agent failed", DependencyLostError: "lost"}
"""The reason, in reports, of samples that an error of this type prevents."""
NO_CALL = "the agent made no call of the model at base_url; a program asks OPENAI_BASE_URL or ANTHROPIC_BASE_URL"


class ScoringLostError(DependencyLostError):
    """The reward-server does not answer: neither an inference server nor an agent is at fault."""


async def score(rewards: RewardClient, items: Sequence[RewardItem]) -> list[RewardResult]:
    """Return one result an item, in order; items that the service failed to score are sent again a few times.

    Raises:
        ScoringLostError: the reward-server does not answer within the client's deadline.
    """
    try:
        return await rewards.score(items, tries=SCORE_TRIES, pause_seconds=SCORE_PAUSE_SECONDS)
    except DependencyLostError as error:
        raise ScoringLostError(str(error)) from error


def seed_of(seed: int, prompt: Prompt, kind: Kind, index: int) -> int:
    """Return the 31-bit seed of a sample, the same on every machine and in a resumed evaluation."""
    return derive_seed(seed, kind.value, prompt.id, index)


def sampling(settings: EvaluationSettings, kind: Kind) -> tuple[float, float]:
    """Return the temperature and the nucleus of a kind of samples."""
    return (0.0, 1.0) if kind is Kind.GREEDY else (settings.temperature, settings.top_p)


@dataclass(frozen=True)
class SingleTurn:
    """One completion answers a prompt."""

    settings: EvaluationSettings
    pool: ServerPool
    at_once: int
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages = ()) -> list[Sample]:
        """Return the completions that a server gave; ``history`` is empty."""
        settings = self.settings
        params = SamplingParams(settings.max_new_tokens, *sampling(settings, kind), stop=settings.eval_stop)
        seed = seed_of(settings.seed, prompt, kind, indices[0])
        return await self.pool.run(lambda server: server.complete(prompt, kind, indices, params, seed))


@dataclass(frozen=True)
class AgentWorkflow:
    """Episodes of an agent through the gateway, as in training."""

    settings: EvaluationSettings
    pool: ServerPool
    """The servers behind the gateway."""
    player: EpisodePlayer
    agent: Agent
    places: asyncio.Semaphore
    """Bounds the episodes at once."""
    at_once: ClassVar[int] = 1
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages = ()) -> list[Sample]:
        """Play one episode for each index, one after the other; each one's conversation continues ``history``.

        Raises:
            AgentFailedError: an episode has no answer, and neither a limit nor a service is the reason.
            DependencyLostError: the gateway, or the engines behind it, did not answer.
            RequestRefusedError: the gateway refused the session.
        """
        async with self.places:
            return [await self._sample(prompt, kind, index, history) for index in indices]

    async def _sample(self, prompt: Prompt, kind: Kind, index: int, history: Messages) -> Sample:
        settings = self.settings
        temperature, top_p = sampling(settings, kind)
        request = CreateSessionRequest(
            id=f"evaluation-{uuid.uuid4().hex}",
            temperature=temperature,
            top_p=top_p,
            seed=seed_of(settings.seed, prompt, kind, index),
            max_turn_tokens=settings.max_new_tokens,
            max_turns=settings.agent_max_turns,
            max_tokens=settings.agent_max_tokens,
            deadline_seconds=2 * settings.agent_seconds,
            lora_path=next((server.adapter for server in self.pool.alive), None),
        )
        started = time.monotonic()
        try:
            episode = await self.player.play(self.agent, prompt, request, history=history)
        except GatewayFailedError as error:
            raise error.error from error
        _check_answered(episode)
        trace = episode.trace
        # The conversation in which the last call was made.
        last = trace.last[0]
        messages = [{name: part for name, part in m.items() if name != "sampled"} for m in last.messages]
        if len(messages) <= len(history):
            raise AgentFailedError("its conversation lacks the session's earlier questions: begin with example.history")
        texts = [m["content"] for m in messages if m["role"] == "assistant" and isinstance(m.get("content"), str)]
        return Sample.of(
            prompt,
            kind,
            index,
            completion=texts[-1] if texts else "",
            finish_reason=last.finish_reason,
            prompt_tokens=len(trace.sequences[0].prompt_ids),
            completion_tokens=trace.sampled_tokens,
            turns=trace.turns,
            tool_calls=trace.tool_calls,
            messages=messages,
            seconds=time.monotonic() - started,
            result=episode.result,
        )


def _check_answered(episode: Episode) -> None:
    """Check that an episode has an answer, which may be wrong because of a limit, or lack a reward of the verifier.

    Raises:
        AgentFailedError: it has no answer.
        DependencyLostError: it has no answer because no engine or gateway answered.
    """
    failure = episode.failure
    if failure is not None and failure.reason == "server":
        raise DependencyLostError(str(failure))
    if failure is not None and failure.reason != "reward_error" and not (episode.is_over_limit and episode.trace.turns):
        raise failure
    if not episode.trace.turns:
        raise AgentFailedError(NO_CALL, "no_call")


Workflow = SingleTurn | AgentWorkflow


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
    """All of one source."""
    samples: int
    """Samples of each prompt in addition to the greedy one."""
    workflow: Workflow
    score: Score
    store: SampleStore
    session_questions: int = 1
    """Prompts that an agent answers in one conversation."""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._rows = {prompt.id: prompt.row_text for prompt in self.prompts}
        """The JSON texts of the prompts' rows, by prompt id."""
        self._source = self.prompts[0].source if self.prompts else ""

    async def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Generate and score the missing samples; ``watch`` is called after each piece of work.

        Raises:
            DependencyLostError: no server answers for long. Finished samples are kept.
            ScoringLostError: the reward-server does not answer.
            ConfigurationError: every prompt or episode fails.
        """
        keys = ((prompt.id, kind, i) for prompt, kind, indices in self._wanted() for i in indices)
        stored = [self.store.samples[key] for key in keys if key in self.store.samples]
        self.progress.total += len(self.prompts) * (1 + self.samples)
        self.progress.done += len(stored)
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
            stored = [self.store.samples.get((prompt.id, kind, index)) for index in indices]
            samples = [sample for sample in stored if sample is not None]
            if len(samples) < len(indices):
                samples = await self._do(prompt, kind, indices, history)
            if samples and samples[-1].messages:
                history = samples[-1].messages
            yield

    async def _do(self, prompt: Prompt, kind: Kind, indices: Sequence[int], history: Messages) -> list[Sample]:
        """Obtain, score and store samples of a prompt; return those that could be obtained."""
        try:
            samples = await self.workflow.sample(prompt, kind, indices, history)
        except ScoringLostError:
            raise
        except (RequestRefusedError, AgentFailedError, DependencyLostError) as error:
            if isinstance(error, DependencyLostError) and not self.workflow.pool.alive:
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
                row=self._rows[sample.prompt_id],
                source=self._source,
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
