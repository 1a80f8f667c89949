"""Plays the episodes of a shard, many at once, and records every step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluation.trajectories.arenas import Arena, Step
from evaluation.trajectories.plan import Shard
from evaluation.trajectories.rows import Rows
from services.environment_server.environments import ActionRefusedError, Transition
from services.evaluation_head.policy import Decision, Policy, StatesRefusedError
from services.protocol.evaluation import State, StateKind

TRIES = 3
"""An episode that its environment or server loses is played again from the beginning, this often in all."""


@dataclass
class _Live:
    """An episode under way."""

    index: int
    attempt: int
    handle: Any
    state: State
    returns: list[float]
    seat: int = 0
    steps: int = 0


@dataclass
class Played:
    """The outcome of a shard: its rows, and what became of each episode by its index."""

    rows: Rows
    attempts: dict[int, int] = field(default_factory=dict)
    """The episode's index by the number of the attempt that came to an end."""
    returns: dict[int, list[float]] = field(default_factory=dict)
    """The return of each seat."""
    steps: dict[int, int] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    """The reason why there is no episode."""


class ShardPlayer:
    """Plays one shard."""

    def __init__(
        self, arena: Arena, policies: Mapping[str, Policy], shard: Shard, seed_of: Callable[[int], int], at_once: int
    ) -> None:
        self._arena = arena
        self._policies = [policies[name] for name in shard.lineup]
        self._seed_of = seed_of
        self._at_once = at_once
        self._todo = deque(range(shard.start, shard.stop))
        self._tries: dict[int, int] = {}
        self._attempts = 0
        self.played = Played(Rows(arena.info))

    async def play(self) -> Played:
        """Play all episodes.

        Raises:
            ProblemError: a policy gives no actions.
            DependencyLostError: the environment server does not answer.
        """
        # Conversations take different times and go on alone. States of numbers share one batch.
        count = min(self._at_once, len(self._todo))
        sizes = [1] * count if self._arena.info.state.kind is StateKind.MESSAGES else [count]
        try:
            async with asyncio.TaskGroup() as group:
                for size in sizes:
                    group.create_task(self._play(size))
        except BaseExceptionGroup as errors:
            # All fail for the same reason, so the first error is enough.
            raise errors.exceptions[0] from None
        return self.played

    async def _play(self, size: int) -> None:
        live: list[_Live] = []
        while True:
            live += await self._begin(size - len(live))
            if not live:
                return
            try:
                decisions = await self._decide(live)
            except StatesRefusedError as error:
                if len(live) > 1:
                    raise
                # A conversation that the model does not take, such as one that is too long, concerns no other.
                await self._give_up(live.pop(), error)
                continue
            steps = [Step(one.handle, one.steps, made.action) for one, made in zip(live, decisions, strict=True)]
            live = await self._follow(live, decisions, await self._arena.step(steps))

    async def _begin(self, room: int) -> list[_Live]:
        """Begin episodes until ``room`` are live, or none is left to do."""
        live: list[_Live] = []
        while indices := [self._todo.popleft() for _ in range(min(room - len(live), len(self._todo)))]:
            begun = await self._arena.begin([self._seed_of(index) for index in indices])
            for index, start in zip(indices, begun, strict=True):
                self._tries[index] = self._tries.get(index, 0) + 1
                if isinstance(start, Exception):
                    self._lose(index, start)
                    continue
                self._attempts += 1
                handle, state = start
                live.append(_Live(index, self._attempts, handle, state, [0.0] * self._arena.info.seats))
        return live

    async def _decide(self, live: Sequence[_Live]) -> list[Decision]:
        """Ask the policy of each seat for the actions in the episodes where it is that seat's turn."""
        if len(self._policies) == 1:
            return await self._policies[0].act([one.state for one in live], logprobs=True)
        decisions: dict[int, Decision] = {}
        for seat, policy in enumerate(self._policies):
            turns = [one for one in live if one.seat == seat]
            if turns:
                made = await policy.act([one.state for one in turns], logprobs=True)
                decisions |= {one.attempt: decision for one, decision in zip(turns, made, strict=True)}
        return [decisions[one.attempt] for one in live]

    async def _follow(
        self, live: Sequence[_Live], decisions: Sequence[Decision], outcomes: Sequence[Transition | Exception]
    ) -> list[_Live]:
        """Record the steps; return the episodes that go on."""
        taken: list[tuple[_Live, Decision, Transition]] = []
        for one, decision, outcome in zip(live, decisions, outcomes, strict=True):
            if isinstance(outcome, Exception):
                await self._give_up(one, outcome)
            else:
                taken.append((one, decision, outcome))
        self._record(taken)
        going, over = [], []
        for one, _, outcome in taken:
            one.steps += 1
            if outcome.terminated or self._is_truncated(one.steps, outcome):
                over.append(one)
            else:
                going.append(one)
                one.state, one.seat = outcome.state, outcome.seat
        for one in over:
            self.played.attempts[one.attempt] = one.index
            self.played.returns[one.index], self.played.steps[one.index] = one.returns, one.steps
        if over:
            await self._arena.end([one.handle for one in over])
        return going

    def _is_truncated(self, steps: int, outcome: Transition) -> bool:
        return not outcome.terminated and (outcome.truncated or steps >= self._arena.info.max_steps)

    def _record(self, taken: Sequence[tuple[_Live, Decision, Transition]]) -> None:
        if not taken:
            return
        seats = self._arena.info.seats
        for one, _, outcome in taken:
            for seat, reward in enumerate(outcome.rewards if seats > 1 else (outcome.reward,)):
                one.returns[seat] += reward
        truncated = [self._is_truncated(one.steps + 1, outcome) for one, _, outcome in taken]
        self.played.rows.add(
            [one.state for one, _, _ in taken],
            attempt=[one.attempt for one, _, _ in taken],
            step=[one.steps for one, _, _ in taken],
            seat=[one.seat for one, _, _ in taken],
            action=[decision.action for _, decision, _ in taken],
            version=[decision.version for _, decision, _ in taken],
            logprob=[decision.logprob for _, decision, _ in taken],
            reward=[(o.rewards[one.seat] if seats > 1 else o.reward) for one, _, o in taken],
            rewards=[outcome.rewards for _, _, outcome in taken],
            terminated=[outcome.terminated for _, _, outcome in taken],
            truncated=truncated,
            final_state=[
                outcome.state if cut or outcome.terminated else None
                for (_, _, outcome), cut in zip(taken, truncated, strict=True)
            ],
        )

    async def _give_up(self, one: _Live, error: Exception) -> None:
        await self._arena.end([one.handle])
        self._lose(one.index, error)

    def _lose(self, index: int, error: Exception) -> None:
        """Play an episode again if that may help; else leave it out."""
        is_final = isinstance(error, ActionRefusedError | StatesRefusedError) or self._tries[index] == TRIES
        if is_final:
            self.played.left_out[index] = str(error) or repr(error)
        else:
            self._todo.append(index)
