"""Plays the episodes of a run, many at once: which policies play which seeds, and the Parquet file of each shard."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evaluation.trajectories.arenas import Arena, Step
from services.environment_server.environments import ActionRefusedError, Transition
from services.evaluation_head.policy import Decision, Policy, StatesRefusedError
from services.protocol.evaluation import ActionKind, EnvironmentInfo, State, StateKind

SEEDS = 2**31


TRIES = 3
"""An episode that its environment or server loses is played again from the beginning, this often in all."""
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SUMMARY = b"trajectories"
_COLUMNS = (
    *("attempt", "step", "seat", "action", "version", "logprob"),
    *("reward", "rewards", "terminated", "truncated", "final_state"),
)


@dataclass(frozen=True)
class Shard:
    """A file's episodes: the seeds ``start`` to ``stop`` (exclusive) of one lineup, counted from the run's seed."""

    number: int
    lineup: tuple[str, ...]
    """The policy in each seat."""
    first_episode: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"shard-{self.number:06d}.parquet"


@dataclass(frozen=True)
class Plan:
    """All episodes, which depend on nothing but these fields.

    Every lineup plays the same seeds: ``seed``, ``seed`` + 1 and so on.
    """

    lineups: Sequence[tuple[str, ...]]
    episodes: int
    """Episodes of each lineup."""
    seed: int
    shard_episodes: int

    def shards(self) -> Iterator[Shard]:
        """Yield the shards in order. Episodes are numbered over all of them."""
        number = itertools.count()
        for place, lineup in enumerate(self.lineups):
            for start in range(0, self.episodes, self.shard_episodes):
                stop = min(start + self.shard_episodes, self.episodes)
                yield Shard(next(number), lineup, place * self.episodes + start, start, stop)

    def seed_of(self, index: int) -> int:
        """Return the seed of a lineup's episode ``index``."""
        return (self.seed + index) % SEEDS


def lineups_of(policies: Sequence[str], seats: int) -> list[tuple[str, ...]]:
    """Return who sits where: each policy alone, or with several seats each ordered choice of different policies.

    If there are fewer policies than seats, policies also sit in several seats.
    """
    if len(policies) >= seats:
        return list(itertools.permutations(policies, seats))
    return list(itertools.product(policies, repeat=seats))


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


class Rows:
    """The steps of one shard in the order in which they were taken; ``table`` sorts them by episode."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self._info = info
        self._states: list[NDArray[np.float64] | list[Any]] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def add(self, states: Sequence[Any], **columns: Sequence[Any]) -> None:
        """Add one step of each of some episodes; ``attempt`` tells episodes that are played again apart."""
        is_numbers = self._info.state.kind is StateKind.NUMBERS
        self._states.append(np.asarray(states, np.float64) if is_numbers else list(states))
        for name, values in columns.items():
            self._columns[name].extend(values)

    def table(self, shard: Shard, indices: Mapping[int, int], seed_of: Callable[[int], int]) -> pa.Table:
        """Return the steps of the attempts in ``indices``, which has the index of each attempt's episode."""
        attempts = np.asarray(self._columns["attempt"], np.int64)
        kept = np.flatnonzero(np.isin(attempts, list(indices)))
        index = np.asarray([indices[attempt] for attempt in attempts[kept]], np.int64)
        steps = np.asarray(self._columns["step"], np.int32)
        order = kept[np.lexsort((steps[kept], index))]
        index = np.sort(index)
        seats = np.asarray(self._columns["seat"], np.int8)[order]
        seeds = {i: seed_of(i) for i in indices.values()}
        columns = {
            "episode": pa.array(index - shard.start + shard.first_episode),
            "seed": pa.array([seeds[i] for i in index.tolist()], pa.int64()),
            "step": pa.array(steps[order]),
            "policy": pa.array(shard.lineup, pa.string()).take(pa.array(seats)),
            "version": self._taken("version", order, pa.int64()),
            "state": self._state_column(order),
            "action": self._taken("action", order, self._action_type()),
            "logprob": self._taken("logprob", order, pa.float64()),
            "reward": self._taken("reward", order, pa.float64()),
            "terminated": self._taken("terminated", order, pa.bool_()),
            "truncated": self._taken("truncated", order, pa.bool_()),
            "final_state": self._taken("final_state", order, self._state_type()),
        }
        if self._info.seats > 1:
            lineups = [list(shard.lineup)] * len(order)
            columns |= {"seat": pa.array(seats), "policies": pa.array(lineups, pa.list_(pa.string()))}
            columns |= {"rewards": self._taken("rewards", order, pa.list_(pa.float64()))}
        return pa.table(columns)

    def _taken(self, name: str, order: NDArray[np.intp], kind: pa.DataType) -> pa.Array:
        values = self._columns[name]
        return pa.array([values[i] for i in order.tolist()], kind)

    def _state_type(self) -> pa.DataType:
        return _nested(self._info.state.shape) if self._info.state.kind is StateKind.NUMBERS else _MESSAGES

    def _action_type(self) -> pa.DataType:
        kinds = {ActionKind.INDEX: pa.int64(), ActionKind.TEXT: pa.string()}
        return kinds.get(self._info.action.kind) or _nested(self._info.action.shape)

    def _state_column(self, order: NDArray[np.intp]) -> pa.Array:
        if self._info.state.kind is not StateKind.NUMBERS:
            states = [state for chunk in self._states for state in chunk]
            return pa.array([states[i] for i in order.tolist()], _MESSAGES)
        shape = self._info.state.shape
        numbers = np.concatenate([np.empty((0, *shape)), *self._states])[order]
        column = pa.array(numbers.reshape(-1))
        for depth in range(len(shape), 0, -1):
            lists = int(np.prod([len(order), *shape[: depth - 1]]))
            column = pa.ListArray.from_arrays(pa.array(np.arange(lists + 1, dtype=np.int32) * shape[depth - 1]), column)
        return column


def _nested(shape: Sequence[int]) -> pa.DataType:
    kind = pa.float64()
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def write_shard(path: Path, table: pa.Table, summary: Mapping[str, Any]) -> None:
    """Write a shard under a hidden name and rename it into place, so that readers see a whole file or none."""
    partial = path.with_name(f".{path.name}.partial")
    metadata = {**(table.schema.metadata or {}), _SUMMARY: json.dumps(summary).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    partial.replace(path)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary that ``write_shard`` wrote into the file's metadata.

    Raises:
        ValueError: the file is not a shard.
    """
    try:
        summary: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[_SUMMARY])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no shard of trajectories: {error!r}") from error
    return summary
