"""Plays the episodes of a run, many at once: which policies play which seeds, and the Parquet file of each shard."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evaluation.trajectories.arenas import OpenArena
from services.clients.play import Decision, Episode, Step, play_at_once
from services.evaluation_head.policy import Policy
from services.protocol.evaluation import ActionKind, EnvironmentInfo, StateKind, StepStatus

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
    """A file's episodes, which one lineup plays."""

    number: int
    lineup: tuple[str, ...]
    """The policy in each seat."""
    first_episode: int
    """The number of its first episode in the run."""
    seeds: Sequence[int]
    """The seed of each episode."""

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
                seeds = [(self.seed + index) % SEEDS for index in range(start, stop)]
                yield Shard(next(number), lineup, place * self.episodes + start, seeds)


def lineups_of(policies: Sequence[str], seats: int) -> list[tuple[str, ...]]:
    """Return who sits where: each policy alone, or with several seats each ordered choice of different policies.

    If there are fewer policies than seats, policies also sit in several seats.
    """
    if len(policies) >= seats:
        return list(itertools.permutations(policies, seats))
    return list(itertools.product(policies, repeat=seats))


class ShardPlayer:
    """Plays one shard, and keeps its rows and the outcome of each episode by the episode's index in the shard."""

    def __init__(self, place: OpenArena, policies: Mapping[str, Policy], shard: Shard, at_once: int) -> None:
        self._place = place
        self._policies = [policies[name] for name in shard.lineup]
        self._at_once = at_once
        self._indices = {seed: index for index, seed in enumerate(shard.seeds)}
        self._todo = deque(shard.seeds)
        self._tries: Counter[int] = Counter()
        self._attempts: defaultdict[Episode, int] = defaultdict(itertools.count().__next__)
        """The number of each episode under way among all that were begun, also again with the same seed."""
        self.rows = Rows(place.info)
        self.attempts: dict[int, int] = {}
        """The episode's index by the number of the attempt that came to an end."""
        self.returns: dict[int, list[float]] = {}
        """The return of each seat."""
        self.left_out: dict[int, str] = {}
        """The reason why an episode has no rows."""

    async def play(self) -> None:
        """Play all episodes.

        Raises:
            ProblemError: a policy gives no actions.
            DependencyLostError: the environment server does not answer.
        """
        info, arena = self._place
        count = min(self._at_once, len(self._todo))
        is_text = info.state.kind is StateKind.MESSAGES
        await play_at_once(count, is_text, arena, self._seeds, self._ask, self._end, self._record)

    def _seeds(self, room: int) -> Sequence[int]:
        return [self._todo.popleft() for _ in range(min(room, len(self._todo)))]

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Ask the policy of each seat for the actions in the episodes where it is that seat's turn."""
        decisions: dict[Episode, Decision] = {}
        for seat, policy in enumerate(self._policies):
            turns = [episode for episode in episodes if episode.seat == seat]
            if turns:
                answers = await policy.act([episode.state for episode in turns], logprobs=True)
                decisions |= zip(turns, answers, strict=True)
        return [decisions[episode] for episode in episodes]

    def _record(self, steps: Sequence[Step]) -> None:
        episodes, decisions, results = zip(*steps, strict=True)
        has_seats = self._place.info.seats > 1
        terminated = [result.status is StepStatus.TERMINATED for result in results]
        truncated = [result.status is StepStatus.TRUNCATED for result in results]
        self.rows.add(
            [episode.state for episode in episodes],
            attempt=[self._attempts[episode] for episode in episodes],
            step=[episode.steps for episode in episodes],
            seat=[episode.seat for episode in episodes],
            action=[decision.action for decision in decisions],
            version=[decision.version for decision in decisions],
            logprob=[decision.logprob for decision in decisions],
            reward=[r.rewards[e.seat] if has_seats else r.reward for e, r in zip(episodes, results, strict=True)],
            rewards=[result.rewards or () for result in results],
            terminated=terminated,
            truncated=truncated,
            final_state=[None if result.status is StepStatus.RUNNING else result.state for result in results],
        )

    async def _end(self, episode: Episode) -> None:
        """Keep an episode that has ended. Play a lost one again while that may help; otherwise leave it out."""
        index, attempt = self._indices[episode.seed], self._attempts[episode]
        del self._attempts[episode]
        self._tries[index] += 1
        if episode.has_ended:
            self.attempts[attempt], self.returns[index] = index, episode.returns
        elif episode.status is StepStatus.REFUSED or self._tries[index] == TRIES:
            self.left_out[index] = str(episode.detail)
        else:
            self._todo.append(episode.seed)


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

    def table(self, shard: Shard, indices: Mapping[int, int]) -> pa.Table:
        """Return the steps of the attempts in ``indices``, which has the index of each attempt's episode."""
        attempts = np.asarray(self._columns["attempt"], np.int64)
        kept = np.flatnonzero(np.isin(attempts, list(indices)))
        index = np.asarray([indices[attempt] for attempt in attempts[kept]], np.int64)
        steps = np.asarray(self._columns["step"], np.int32)
        order = kept[np.lexsort((steps[kept], index))]
        index = np.sort(index)
        seats = np.asarray(self._columns["seat"], np.int8)[order]
        columns = {
            "episode": pa.array(index + shard.first_episode),
            "seed": pa.array(np.asarray(shard.seeds, np.int64)[index]),
            "step": pa.array(steps[order]),
            "policy": pa.array(shard.lineup, pa.string()).take(pa.array(seats)),
            "version": self._column("version", order, pa.int64()),
            "state": self._state_column(order),
            "action": self._column("action", order, self._action_type()),
            "logprob": self._column("logprob", order, pa.float64()),
            "reward": self._column("reward", order, pa.float64()),
            "terminated": self._column("terminated", order, pa.bool_()),
            "truncated": self._column("truncated", order, pa.bool_()),
            "final_state": self._column("final_state", order, self._state_type()),
        }
        if self._info.seats > 1:
            lineups = [list(shard.lineup)] * len(order)
            columns |= {"seat": pa.array(seats), "policies": pa.array(lineups, pa.list_(pa.string()))}
            columns |= {"rewards": self._column("rewards", order, pa.list_(pa.float64()))}
        return pa.table(columns)

    def _column(self, name: str, order: NDArray[np.intp], kind: pa.DataType) -> pa.Array:
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
        raise ValueError(f"{path} is not a shard of trajectories: {error!r}") from error
    return summary
