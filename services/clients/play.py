"""The player of prompts, and of episodes wherever their environments are: here, on one server, or on any of several.

Training, evaluations inside a run and ``grpo evaluate`` have a model answer prompts, and the answers scored, by this
module, so that the same seed, weights and prompt give the same tokens and the same reward everywhere. Agents' episodes
are in ``agent_episodes.py``.

The environments of other episodes are in an arena. ``play`` asks for one action in each episode under way, takes all
these actions in the arena, and repeats this. It is used by the evaluation head, by environment servers that play by
themselves, and by the commands that evaluate policies and write trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from services.protocol import evaluation as wire
from services.protocol.base import derive_seed
from services.protocol.groups import TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult

if TYPE_CHECKING:
    from services.clients.rollout import SamplingParams


@dataclass(eq=False)
class Episode:
    """An episode under way, as the side that chooses its actions keeps it, with its latest state.

    With ``status`` TERMINATED or TRUNCATED the environment has ended it. With REFUSED or LOST it cannot continue,
    ``detail`` says why, and it has no return, which is not a return of 0.
    """

    id: str
    seed: int
    state: wire.State
    seat: int = 0
    """The seat that acts next."""
    steps: int = 0
    returns: list[float] = field(default_factory=lambda: [0.0])
    """The sum of rewards of each seat."""
    status: wire.StepStatus = wire.StepStatus.RUNNING
    detail: str | None = None

    @classmethod
    def begun(cls, start: wire.EpisodeStart, info: wire.EnvironmentInfo, **fields: Any) -> Self:
        """Return the episode that has begun in an environment; ``fields`` are those of a subclass."""
        return cls(start.episode, start.seed, start.state, start.seat or 0, returns=[0.0] * info.seats, **fields)

    @classmethod
    def not_begun(cls, seed: int, why: str) -> Episode:
        """Return an episode that is lost before its first state."""
        return cls("", seed, [], status=wire.StepStatus.LOST, detail=why)

    @property
    def episode_return(self) -> float:
        """The return of the first seat."""
        return self.returns[0]

    @property
    def has_ended(self) -> bool:
        """True once the environment has ended the episode."""
        return self.status in (wire.StepStatus.TERMINATED, wire.StepStatus.TRUNCATED)

    @property
    def position(self) -> wire.EpisodePosition:
        """The episode's entry in a request for actions."""
        return wire.EpisodePosition.model_construct(
            episode=self.id, step=self.steps, episode_return=self.episode_return
        )

    @property
    def report(self) -> wire.FinishedEpisode:
        """The report of the episode's end."""
        return wire.FinishedEpisode.model_construct(
            episode=self.id, steps=self.steps, episode_return=self.episode_return, seed=self.seed
        )

    def step_with(self, action: wire.Action) -> wire.StepItem:
        """Return the next step, with ``action``."""
        return wire.StepItem(episode=self.id, step=self.steps, action=action)

    def follow(self, result: wire.StepResult) -> None:
        """Move on to the state after a step."""
        assert result.state is not None
        self.state, self.steps, self.seat, self.status = result.state, result.steps, result.seat or 0, result.status
        for seat, reward in enumerate(result.rewards or (result.reward,)):
            self.returns[seat] += reward

    def give_up(self, status: wire.StepStatus, why: str | None) -> None:
        """End the episode without a return."""
        self.status, self.detail = status, why


PlayedEpisode = TypeVar("PlayedEpisode", bound=Episode)


class Arena(Protocol[PlayedEpisode]):
    """A place with episodes of one environment."""

    async def begin(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """Begin an episode for each seed; one that cannot begin has the status LOST."""

    async def step(self, moves: Sequence[tuple[PlayedEpisode, wire.Action]]) -> list[wire.StepResult]:
        """Take one action in each of some episodes and return the results. The caller lets the episodes follow them."""

    async def end(self, episodes: Sequence[PlayedEpisode]) -> None:
        """Release episodes of any status."""


class Decision(NamedTuple):
    """An action, and the version of the policy that chose it; None where no single version did.

    ``logprob`` is the action's log-probability in nats; None where the policy gives none.
    """

    action: wire.Action
    version: int | None = None
    logprob: float | None = None


class NoActionError(Exception):
    """A policy gives no action for one of the states that it was asked for; ``detail`` says why."""

    detail: str


class Step(NamedTuple):
    """An action in an episode, which still has the state that the action is for, and its result."""

    episode: Episode
    decision: Decision
    result: wire.StepResult


Seeds = Callable[[int], Sequence[int]]
"""Returns the seeds of the episodes to begin now, at most as many as its argument says."""
Ask = Callable[[Sequence[PlayedEpisode]], Awaitable[Sequence[Decision]]]
"""Returns a decision for each episode, or raises NoActionError; any other error ends the play."""
OnSteps = Callable[[Sequence[Step]], None]
"""Takes the steps of one round that were neither refused nor lost."""
OnEnd = Callable[[PlayedEpisode], Awaitable[None]]
"""Takes an episode that has ended, was given up, or could not begin."""


async def play_at_once(
    sizes: Sequence[int],
    arena: Arena[PlayedEpisode],
    seeds: Seeds,
    ask: Ask[PlayedEpisode],
    on_end: OnEnd[PlayedEpisode],
    on_steps: OnSteps | None = None,
) -> None:
    """Play groups of these ``sizes`` at the same time, each at its own pace, until ``seeds`` returns none."""
    try:
        async with asyncio.TaskGroup() as group:
            for size in sizes:
                group.create_task(play(size, arena, seeds, ask, on_end, on_steps))
    except BaseExceptionGroup as errors:
        # All fail for the same reason, so the first error is enough.
        raise errors.exceptions[0] from None


async def play(
    size: int,
    arena: Arena[PlayedEpisode],
    seeds: Seeds,
    ask: Ask[PlayedEpisode],
    on_end: OnEnd[PlayedEpisode],
    on_steps: OnSteps | None = None,
    under_way: list[PlayedEpisode] | None = None,
) -> None:
    """Play ``size`` episodes together, one action of each at a time, until ``seeds`` returns none.

    ``under_way`` has episodes to continue. The caller may add to it. An error of the arena leaves the episodes in it.
    """
    under_way = [] if under_way is None else under_way
    while True:
        room = size - len(under_way)
        new = seeds(room) if room > 0 else ()
        for episode in await arena.begin(new) if new else ():
            if episode.status is wire.StepStatus.RUNNING:
                under_way.append(episode)
            else:
                await on_end(episode)
        if not under_way and not new:
            return
        asked = list(under_way)
        moves = await _decide(ask, asked) if asked else []
        results = await arena.step([(episode, decision.action) for episode, decision in moves]) if moves else []
        steps = [Step(episode, decision, result) for (episode, decision), result in zip(moves, results, strict=True)]
        new_steps = [step for step in steps if step.result.is_taken]
        if on_steps is not None and new_steps:
            on_steps(new_steps)
        for step in steps:
            if step.result.is_taken:
                step.episode.follow(step.result)
            else:
                step.episode.give_up(step.result.status, step.result.detail)
        over = [episode for episode in asked if episode.status is not wire.StepStatus.RUNNING]
        for episode in over:
            under_way.remove(episode)
        if over:
            await arena.end(over)
        for episode in over:
            await on_end(episode)


async def _decide(ask: Ask[PlayedEpisode], episodes: Sequence[PlayedEpisode]) -> list[tuple[PlayedEpisode, Decision]]:
    """Ask for decisions; if the policy refuses a state, ask for each state alone, and give up the refused one only."""
    try:
        return list(zip(episodes, await ask(episodes), strict=True))
    except NoActionError as error:
        if len(episodes) == 1:
            episodes[0].give_up(wire.StepStatus.REFUSED, error.detail)
            return []
    alone = await asyncio.gather(*(_decide(ask, [episode]) for episode in episodes))
    return [pair for pairs in alone for pair in pairs]


# --- prompts ----------------------------------------------------------------------------------------------------------

Score = Callable[[Sequence[RewardItem]], Awaitable[list[RewardResult]]]


class Engines(Protocol):
    """The servers of a model: rollout workers, or any other server of completions."""

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[TokenSequence]:
        """Return at most ``n`` completions of a prompt, and at least one.

        Raises:
            RequestRefusedError: the engine refuses the prompt.
            DependencyLostError: no engine gave a completion in time.
        """


async def scored(score: Score, prompt: Prompt, completions: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return completions of a prompt with their results, in order."""
    items = [
        RewardItem.of(prompt, one.completion, completion_tokens=one.tokens, finish_reason=one.finish_reason)
        for one in completions
    ]
    results = await score(items)
    return [one.model_copy(update={"result": result}) for one, result in zip(completions, results, strict=True)]


def evaluation_seed(seed: int, prompt: Prompt, first: int = 0) -> int:
    """Return the seed of an evaluation's answers to a prompt from number ``first`` on: the same on every machine."""
    of_prompt = derive_seed(seed, "evaluation", prompt.id)
    return derive_seed(of_prompt, first) if first else of_prompt
