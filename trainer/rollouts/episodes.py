"""The ways of rolling out whose answers are episodes, played through the gateway: agents and programs.

The traces of the episodes become sequences that continue one prompt, with rewards of turns and messages to read.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import dropwhile, takewhile
from typing import Any, Self

import numpy as np
import orjson
from prometheus_client import Counter

from services.agents import EPISODES_AT_ONCE, Agent, AgentFailedError, load_agent, programs_at_once
from services.clients.agent_episodes import Episode, EpisodePlayer, GatewayFailedError
from services.clients.environment import EnvironmentClient
from services.clients.games import BoxedProgram
from services.clients.gateway import GatewayClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.chat import CalledFunction, EpisodeFigures, Message
from services.protocol.groups import TokenSequence, Turn
from services.protocol.prompts import Prompt
from services.protocol.rewards import UNASKED, RewardItem, RewardResult, RewardStatus
from services.protocol.sessions import CreateSessionRequest, TraceSequence
from services.weights.policy_store import ADAPTER_NAME
from trainer.config import Rollout, TrainerSettings
from trainer.rollouts.groups import OWN_REASONS, Answers, Sampler, group_id

EPISODES = Counter("trainer_episodes", "Episodes whose trace was received.")
TOKENS = Counter("trainer_episode_tokens", "Tokens sampled in the episodes' traces.")
LOST_TOKENS = Counter(
    "trainer_episode_tokens_lost", "Tokens of episodes that cannot be trained on, by reason.", ["reason"]
)

ALONE = (
    "judge_group compares the answers of a whole group, but example.score, and a program's answer, is scored alone: "
    "let the agent or program give a reward of its own, to which judge_group is added, or take judge_group out of "
    "REWARD_FN"
)
MOST_CHARACTERS = 50_000
"""Longer conversations are cut. The tokens of such a conversation take eight times its space on the wire."""

Outcome = Episode | GatewayFailedError
"""An episode that has ended, or the gateway's failure that ended it."""


class Episodes(Sampler):
    """A way of rolling out whose answers are episodes.

    An episode over a limit is a wrong answer, and a failed one has no reward. A prompt of which every episode failed is
    left out and counted.
    """

    def __init__(self, settings: TrainerSettings, rewards: RewardClient, gateway: GatewayClient) -> None:
        super().__init__(settings, rewards)
        self.gateway = gateway
        self.services = [gateway]
        self._player = EpisodePlayer(
            gateway,
            settings.model_name,
            self._score_alone,
            settings,
            patience=settings.service_deadline_seconds,
        )
        # Programs take memory.
        usual = programs_at_once() if settings.rollout is Rollout.PROGRAM else EPISODES_AT_ONCE
        self._places = asyncio.Semaphore(settings.agent_concurrency or usual)

    @abstractmethod
    async def play(self, prompt: Prompt, n: int, request: Callable[[int], CreateSessionRequest]) -> list[Outcome]:
        """Play a prompt ``n`` times; ``request`` returns the session of the episode of each number."""

    async def answer(
        self, prompt: Prompt, params: SamplingParams, n: int, seed: int, *, is_group: bool = False
    ) -> Answers:
        """Play a prompt ``n`` times, and return the sequences of the episodes."""
        adapter = ADAPTER_NAME if self.settings.lora_rank else None
        of_group = group_id(self.settings, prompt)
        request = partial(self._player.session, params, seed, group_id=of_group, lora_path=adapter)
        outcomes = await self.play(prompt, n, request)
        if is_group:
            outcomes = await self.compare(prompt, outcomes)
        episodes = [episode for episode in outcomes if isinstance(episode, Episode)]
        prompt_ids, sequences = sequences_of(episodes)
        answers = Answers(prompt_ids, sequences, figures={e.trace.index: _figures(e) for e in episodes})
        for outcome in outcomes:
            if (reason := why_failed(outcome)) is not None:
                answers.failed[reason] += 1
                text = outcome.result.reason if isinstance(outcome, Episode) else str(outcome)
                answers.examples.setdefault(reason, str(text))
        if not sequences or not any(e.failure is None or e.is_over_limit for e in episodes):
            answers.error = _why_all_failed(outcomes)
        return answers

    async def compare(self, prompt: Prompt, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the episodes with the rewards that are relative to their group."""
        return outcomes

    async def _score_alone(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Score the answers for which an agent asks, unless they are compared with those of other episodes."""
        if not (items and self.settings.needs_rewards and await self.rewards.is_relative(items[0].source)):
            return await self.score(items)
        self.report("reward_error", ALONE)
        return [RewardResult(reward=None, status=RewardStatus.ERROR, reason=ALONE) for _ in items]

    async def _episode(
        self, agent: Agent, prompt: Prompt, request: CreateSessionRequest, seat: int | None = None
    ) -> Outcome:
        """Play an episode."""
        try:
            episode = await self._player.play(agent, prompt, request, seat=seat)
        except GatewayFailedError as error:
            return error
        EPISODES.inc()
        TOKENS.inc(episode.trace.sampled_tokens)
        for reason, count in episode.trace.lost_tokens.items():
            LOST_TOKENS.labels(reason).inc(count)
        if episode.failure is not None and episode.failure.reason in OWN_REASONS:
            self.report(episode.failure.reason, str(episode.failure))
        return episode

    def all_failed(self, failure: Exception | None, prompts: str) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when no prompt got an episode."""
        reason = f"every episode of {prompts} in a row failed: {failure}"
        if isinstance(failure, DependencyLostError) or (
            isinstance(failure, AgentFailedError) and failure.reason in ("server", "lost")
        ):
            return DependencyLostError(reason)
        return ConfigurationError(f"{reason}; {self.advice}")

    @property
    @abstractmethod
    def advice(self) -> str:
        """Advice to somebody whose every episode failed."""

    async def statistics(self, deadline: float) -> dict[str, float]:
        """Return the gateway's account of the run's sampled tokens.

        The tokens that engines sampled are those in traces, in open episodes, and lost, by reason.
        """
        stats = await self.gateway.stats(deadline=deadline)
        return await super().statistics(deadline) | {
            "episode_tokens_engines": float(stats.engine_tokens),
            "episode_tokens_traces": float(stats.trace_tokens),
            "episode_tokens_open": float(stats.open_tokens),
            **{f"episode_tokens_lost_{reason}": float(tokens) for reason, tokens in stats.lost_tokens.items()},
        }


class Agents(Episodes):
    """An agent plays the episodes: a function of the user's, or a program behind a relay, or in the box of its task."""

    def __init__(self, settings: TrainerSettings, rewards: RewardClient, gateway: GatewayClient, agent: Agent) -> None:
        super().__init__(settings, rewards, gateway)
        self.agent = agent
        self._environments = EnvironmentClient(token=settings.token, deadline=settings.service_deadline_seconds)
        self._boxed = BoxedProgram(
            *(settings.agent_command, settings, settings.max_new_tokens, self._environments),
            patience=settings.service_deadline_seconds,
        )

    @classmethod
    def of(cls, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> Self:
        """Import the function, or make the relay; and make the gateway's client."""
        if settings.rollout is not Rollout.PROGRAM:
            return cls(settings, rewards, gateway_client(settings), load_agent("AGENT", settings.agent))
        # A collector that needs no web server is smaller by its modules.
        from services.harnesses import program_of
        from services.relay import Relay

        program = program_of(settings.agent_command, settings.agent_max_turns, settings.max_new_tokens)
        return cls(settings, rewards, gateway_client(settings), Relay(program))

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the clients, and start the relay of a program."""
        await super().open(stack)
        await stack.enter_async_context(self._environments)
        if isinstance(self.agent, AbstractAsyncContextManager):
            await stack.enter_async_context(self.agent)

    async def play(self, prompt: Prompt, n: int, request: Callable[[int], CreateSessionRequest]) -> list[Outcome]:
        """Let the agent answer a prompt ``n`` times."""
        is_boxed = prompt.is_task and self.settings.rollout is Rollout.PROGRAM
        agent = self._boxed if is_boxed else self.agent

        async def one(index: int) -> Outcome:
            async with self._places:
                return await self._episode(agent, prompt, request(index))

        return await asyncio.gather(*map(one, range(n)))

    async def compare(self, prompt: Prompt, outcomes: list[Outcome]) -> list[Outcome]:
        """Add the rewards that compare the episodes; failed episodes and those over a limit stay as they are.

        A judge reads the last conversation of an episode from the assistant's first message on.
        """
        if self.settings.reward_weight == 0 or not await self.rewards.is_relative(prompt.source):
            return outcomes
        rewarded = {
            number: (outcome, outcome.result.reward)
            for number, outcome in enumerate(outcomes)
            if isinstance(outcome, Episode) and outcome.result.reward is not None and outcome.trace.sequences
        }
        items = [RewardItem.of(prompt, _transcript(episode)) for episode, _ in rewarded.values()]
        results = await self.score_group(items, [reward for _, reward in rewarded.values()]) if items else []
        compared = list(outcomes)
        for (number, (episode, _)), result in zip(rewarded.items(), results, strict=True):
            is_own = result.status is RewardStatus.ERROR
            failure = AgentFailedError(str(result.reason), "reward_error") if is_own else None
            compared[number] = replace(episode, result=result, failure=failure)
        return compared

    @property
    def advice(self) -> str:
        """The command that plays one episode."""
        option = f"--agent {self.settings.agent}" if self.settings.agent else "--agent-command"
        return f"`grpo evaluate {option} --limit 1` plays one episode"


def gateway_client(settings: TrainerSettings) -> GatewayClient:
    """Return a client of the job group's gateway."""
    return GatewayClient(token=settings.token, deadline=settings.service_deadline_seconds)


def why_failed(outcome: Outcome) -> str | None:
    """Return the reason, as a metric's label, why an episode failed or is over a limit; None for any other."""
    if not isinstance(outcome, Episode):
        return "gateway"
    if outcome.failure is not None:
        return outcome.failure.reason
    if outcome.result.status is RewardStatus.OVER_LIMIT:
        return "reward_over_limit"
    return "no_reward" if outcome.result.reward is None and outcome.result != UNASKED else None


def _why_all_failed(outcomes: Sequence[Outcome]) -> Exception:
    """Return the reason why no episode of a prompt is usable."""
    episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
    failures = [episode.failure for episode in episodes if episode.failure]
    if not episodes:
        return next(outcome.error for outcome in reversed(outcomes) if isinstance(outcome, GatewayFailedError))
    if not failures:
        return AgentFailedError("the agent never called the model")
    # Where one episode failed by a limit or a lost service, the user's code is not all that failed.
    return next((failure for failure in failures if failure.reason not in OWN_REASONS), failures[-1])


def _figures(episode: Episode) -> EpisodeFigures:
    """Return the figures of an episode: the gateway's, the agent's, and those of its seat."""
    trace = episode.trace
    return EpisodeFigures(
        turns=trace.turns,
        tool_calls=trace.tool_calls,
        unparsed_tool_calls=trace.unparsed_tool_calls,
        tools_offered=trace.tools_offered,
        branches=trace.branches,
        calls_repeated=trace.calls_repeated,
        figures=episode.figures,
        seat=episode.seat,
        won=episode.has_won,
    )


def _transcript(episode: Episode) -> str:
    """Return the last conversation of an episode as text, from the first message of an assistant."""
    messages = dropwhile(lambda message: message.role != "assistant", shorten(episode.trace.sequences[-1].messages))
    lines = []
    for message in messages:
        calls = [f"calls {call.name}({call.arguments})" for call in message.tool_calls]
        lines.append("\n".join([f"[{message.name or message.role}]", message.content, *calls]))
    return "\n\n".join(lines)


def shorten(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return chat messages as people read them. Text beyond MOST_CHARACTERS is cut; a note says how much.

    A part of a message that is not text, such as an image, becomes its type in brackets.
    """
    short: list[Message] = []
    left = MOST_CHARACTERS
    tools: dict[str, str] = {}
    """Names of tools by the id of their call."""

    def cut(text: str) -> str:
        nonlocal left
        kept, left = text[:left], max(left - len(text), 0)
        return kept if len(kept) == len(text) else f"{kept}… {len(text) - len(kept)} more characters"

    for message in messages:
        role = str(message.get("role"))
        name = tools.get(str(message.get("tool_call_id")), message.get("name"))
        if left == 0:
            return [*short, Message(role=role, content=f"… {len(messages) - len(short)} more messages")]
        calls = []
        content = cut(_text(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            calls.append(
                CalledFunction(name=str(function.get("name")), arguments=cut(_text(function.get("arguments"))))
            )
            tools[str(call.get("id"))] = calls[-1].name
        sampled = message.get("sampled") is True
        short.append(Message(role=role, content=content, tool_calls=calls, name=name and str(name), sampled=sampled))
    return short


def _text(content: Any) -> str:
    """Return the text of a message's content, of its parts, or of a tool call's arguments."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
    return orjson.dumps(content).decode()


def sequences_of(episodes: Sequence[Episode]) -> tuple[list[int], list[TokenSequence]]:
    """Return the prompt that all sequences of the episodes share, and the sequences that continue it.

    The prompt is the longest common prefix of the sequences' prompts; the rest of a sequence's prompt is among its
    completion tokens, outside the loss mask. Sequences without a sampled token are left out. So are sequences that
    begin with another token than the first one; their sampled tokens are counted as lost.
    """
    sampled = [(e, s) for e in episodes for s in e.trace.sequences if s.trained_tokens]
    kept = [(e, s) for e, s in sampled if s.prompt_ids[0] == sampled[0][1].prompt_ids[0]]
    if lost := sum(s.trained_tokens for _, s in sampled) - sum(s.trained_tokens for _, s in kept):
        LOST_TOKENS.labels("no_common_prompt").inc(lost)
    columns = zip(*(s.prompt_ids for _, s in kept), strict=False)
    prompt_ids = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return prompt_ids, [_sequence(e, s, len(prompt_ids)) for e, s in kept]


def _sequence(episode: Episode, trace: TraceSequence, shared: int) -> TokenSequence:
    """Return a sequence of a trace that continues the first ``shared`` tokens of its prompt."""
    context = trace.prompt_ids[shared:]
    messages = shorten(trace.messages)
    if any(turn.call == episode.trace.turns - 1 for turn in trace.turns or ()):
        messages[-1] = messages[-1].model_copy(update={"is_last": True})
    return TokenSequence(
        completion=trace.text,
        completion_ids=np.concatenate([np.array(context, np.int32), trace.completion_ids]),
        logprobs=np.concatenate([np.zeros(len(context)), np.where(trace.mask, trace.logprobs, 0.0)]),
        loss_mask=np.concatenate([np.zeros(len(context), bool), trace.mask]),
        # No policy sampled the context, so any version will do.
        policy_versions=np.concatenate([np.repeat(trace.policy_versions[:1], len(context)), trace.policy_versions]),
        finish_reason=trace.finish_reason,
        result=episode.result,
        episode=episode.trace.index,
        seat=episode.seat,
        messages=messages,
        turns=_turns(episode, trace, len(context)),
    )


def _turns(episode: Episode, trace: TraceSequence, context: int) -> list[Turn] | None:
    """Return a sequence's turns with their rewards, ``context`` tokens further on; None where the episode has none.

    The rewards of an episode's turns sum to its reward: the last call gets what the agent gave beyond its turns. Calls
    with one prompt have the rewards of all of them, as the choices of one call have its reward.
    """
    rewards = list(episode.turn_rewards)
    if not rewards or not trace.turns or episode.result.reward is None:
        return None
    rewards[-1] += episode.result.reward - math.fsum(rewards)
    firsts: dict[int, int] = {}
    for call, number in sorted((t.call or 0, t.number) for s in episode.trace.sequences for t in s.turns or ()):
        firsts.setdefault(number, call)
    calls = [firsts[turn.number] for turn in trace.turns]
    return [
        Turn(
            number=turn.number,
            start=turn.start + context,
            end=turn.end + context,
            reward=math.fsum(rewards[first:following]),
        )
        for turn, first, following in zip(trace.turns, calls, [*calls[1:], len(rewards)], strict=True)
    ]
