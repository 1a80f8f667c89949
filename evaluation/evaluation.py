"""The evaluation of one model: generates what is missing for every prompt, has it scored, and stores it at once.

A workflow is the way in which a prompt is answered: one completion, or an agent that talks to the model over several
turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from evaluation.settings import EvaluationSettings
from evaluation.store import Kind, Sample, SampleStore
from services.agents import Agent, AgentFailedError
from services.clients.agent_episodes import Episode, EpisodePlayer, GatewayFailedError
from services.clients.play import Engines, Score, evaluation_seed, scored
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import RequestRefusedError
from services.protocol.accuracy import is_judged
from services.protocol.prompts import Prompt

WINDOW = 4096
"""Pieces of work begun at once; engines and workflow bound how many of them are under way."""
HOPELESS_FAILURES = 20
"""After this many failures without a single success, the evaluation gives up."""
LEFT_OUT = {RequestRefusedError: "refused", AgentFailedError: "agent failed", DependencyLostError: "lost"}
"""The reason, in reports, of samples that an error of this type prevents."""
UNSCORED = "unscored"
"""The reason of samples that the reward-server failed to score: the next attempt may succeed."""
NO_CALL = "the agent made no call of the model at base_url; a program asks OPENAI_BASE_URL or ANTHROPIC_BASE_URL"


def sampling(settings: EvaluationSettings, kind: Kind) -> SamplingParams:
    """Return the parameters with which a kind of samples is drawn."""
    chosen = (0.0, 1.0) if kind is Kind.GREEDY else (settings.temperature, settings.top_p)
    return SamplingParams(settings.max_new_tokens, *chosen, stop=settings.eval_stop)


@dataclass(frozen=True)
class SingleTurn:
    """One completion answers a prompt."""

    settings: EvaluationSettings
    engines: Engines
    score: Score
    at_once: int
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """Return the completions that the engines gave, with their results."""
        started = time.monotonic()
        seed = evaluation_seed(self.settings.seed, prompt, indices[0])
        completions = await self.engines.complete(prompt, sampling(self.settings, kind), len(indices), seed)
        seconds = time.monotonic() - started
        return [
            Sample.of(
                prompt,
                kind,
                index,
                completion=completion.completion,
                finish_reason=completion.finish_reason,
                prompt_tokens=len(prompt.prompt_ids),
                completion_tokens=completion.tokens,
                policy_version=completion.oldest_version if completion.tokens else None,
                seconds=seconds,
                result=completion.scoring,
            )
            for index, completion in zip(indices, await scored(self.score, prompt, completions), strict=False)
        ]


@dataclass(frozen=True)
class AgentWorkflow:
    """Episodes of an agent through the gateway, as in training."""

    settings: EvaluationSettings
    player: EpisodePlayer
    agent: Agent
    places: asyncio.Semaphore
    """Bounds the episodes at once."""
    adapter: str | None = None
    """The LoRA adapter to sample with; None: the model alone."""
    at_once: int = 1
    """The most samples of a prompt that are one piece of work."""

    async def sample(self, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> list[Sample]:
        """Play one episode for each index, one after the other.

        Raises:
            AgentFailedError: an episode has no answer, and neither a limit nor a service is the reason.
            DependencyLostError: the gateway, or the engines behind it, did not answer.
            RequestRefusedError: the gateway refused the session.
        """
        async with self.places:
            return [await self._sample(prompt, kind, index) for index in indices]

    async def _sample(self, prompt: Prompt, kind: Kind, index: int) -> Sample:
        seed = evaluation_seed(self.settings.seed, prompt)
        request = self.player.session(sampling(self.settings, kind), seed, index, lora_path=self.adapter)
        started = time.monotonic()
        try:
            episode = await self.player.play(self.agent, prompt, request)
        except GatewayFailedError as error:
            raise error.error from error
        _check_answered(episode)
        trace = episode.trace
        # The conversation in which the last call was made.
        last = trace.last[0]
        messages = [{name: part for name, part in m.items() if name != "sampled"} for m in last.messages]
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
    def throughput(self) -> dict[str, int | float | None]:
        """The throughput of this process only; the samples of earlier attempts are counted apart."""
        seconds = time.monotonic() - self.started
        return {
            "seconds": seconds,
            "samples": self.fresh,
            "samples_resumed": self.done - self.fresh,
            "samples_per_second": self.fresh / seconds if self.fresh else None,
            "completion_tokens_per_second": self.tokens / seconds if self.fresh else None,
        }

    def resume(self, samples: Sequence[Sample]) -> None:
        """Count samples of earlier attempts."""
        judged = [s.is_correct for s in samples if s.kind is Kind.GREEDY and s.is_correct is not None]
        self.greedy += len(judged)
        self.correct += sum(judged)
        self.done += len(samples)

    def add(self, samples: Sequence[Sample]) -> None:
        """Count fresh samples."""
        self.resume(samples)
        self.fresh += len(samples)
        self.tokens += sum(sample.completion_tokens for sample in samples)

    def leave_out(self, prompt: Prompt, reason: str, detail: str, count: int) -> None:
        """Count samples that could not be obtained.

        Raises:
            ConfigurationError: nothing succeeds.
        """
        self.left_out[reason] += count
        self.examples.setdefault(reason, f"{prompt.id}: {detail}")
        if reason != UNSCORED and not self.done and self.left_out.total() >= min(HOPELESS_FAILURES, self.total):
            raise ConfigurationError(f"nothing succeeds: {dict(self.left_out)} samples; {prompt.id}: {detail}")


@dataclass
class Evaluation:
    """The evaluation of one model, which continues from the samples in its store."""

    prompts: Sequence[Prompt]
    """All of one source."""
    samples: int
    """Samples of each prompt in addition to the greedy one."""
    workflow: Workflow
    store: SampleStore
    is_healthy: Callable[[], Awaitable[bool]]
    """Returns whether engines and reward-server answer; without them no further sample is tried."""
    progress: Progress = field(default_factory=Progress)

    async def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Obtain the missing samples; ``watch`` is called after each piece of work.

        Raises:
            DependencyLostError: the engines or the reward-server do not answer. Finished samples are kept.
            ConfigurationError: every prompt or episode fails.
        """
        wanted = ((p.id, kind, i) for p in self.prompts for kind, indices in self._wanted for i in indices)
        self.progress.resume([self.store.samples[key] for key in wanted if key in self.store.samples])
        self.progress.total += len(self.prompts) * (1 + self.samples)
        watch(self.progress)
        window = asyncio.Semaphore(WINDOW)

        async def do(prompt: Prompt, kind: Kind, indices: Sequence[int]) -> None:
            try:
                await self._do(prompt, kind, indices)
                watch(self.progress)
            finally:
                window.release()

        try:
            async with asyncio.TaskGroup() as group:
                for prompt, kind, indices in self._missing():
                    await window.acquire()
                    group.create_task(do(prompt, kind, indices))
        except BaseExceptionGroup as errors:
            # All tasks fail for the same reason, so the first error is enough.
            raise errors.exceptions[0] from None

    @property
    def _wanted(self) -> tuple[tuple[Kind, range], ...]:
        """The indices of the samples of each prompt, by kind."""
        return (Kind.GREEDY, range(1)), (Kind.SAMPLED, range(self.samples))

    def _missing(self) -> Iterator[tuple[Prompt, Kind, Sequence[int]]]:
        """Yield the samples that are not stored, in pieces of work."""
        for prompt in self.prompts:
            for kind, indices in self._wanted:
                missing = [i for i in indices if (prompt.id, kind, i) not in self.store.samples]
                for start in range(0, len(missing), self.workflow.at_once):
                    yield prompt, kind, missing[start : start + self.workflow.at_once]

    async def _do(self, prompt: Prompt, kind: Kind, indices: Sequence[int]) -> None:
        """Obtain and store samples of a prompt."""
        try:
            samples = await self.workflow.sample(prompt, kind, indices)
        except (RequestRefusedError, AgentFailedError, DependencyLostError) as error:
            if isinstance(error, DependencyLostError) and not await self.is_healthy():
                raise
            self.progress.leave_out(prompt, LEFT_OUT[type(error)], str(error), len(indices))
            return
        if missing := len(indices) - len(samples):
            self.progress.leave_out(prompt, "missing", "the engine gave fewer completions than asked for", missing)
        judged = [sample for sample in samples if is_judged(sample.result)]
        self.store.add(judged)
        self.progress.add(judged)
        if unscored := [sample.result for sample in samples if not is_judged(sample.result)]:
            self.progress.leave_out(prompt, UNSCORED, str(unscored[0].reason), len(unscored))
