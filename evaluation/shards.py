"""The Parquet files of trajectories: one file for each shard of the episodes, one row for each step."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.clients.play import Decision, Episode, Step
from services.evaluation_head.policies import Policy
from services.protocol.evaluation import ActionKind, EnvironmentInfo, StateKind, StepStatus

SEEDS = 2**31
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SUMMARY = b"trajectories"


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


def shards_of(lineups: Sequence[tuple[str, ...]], *, episodes: int, seed: int, shard_episodes: int) -> Iterator[Shard]:
    """Yield all shards in order, which depend on nothing else; episodes are numbered over all of them.

    Every lineup plays ``episodes`` episodes with the same seeds: ``seed``, ``seed`` + 1 and so on.
    """
    number = itertools.count()
    for place, lineup in enumerate(lineups):
        for start in range(0, episodes, shard_episodes):
            seeds = [(seed + index) % SEEDS for index in range(start, min(start + shard_episodes, episodes))]
            yield Shard(next(number), lineup, place * episodes + start, seeds)


def lineups_of(policies: Sequence[str], seats: int) -> list[tuple[str, ...]]:
    """Return who sits where: each policy alone, or with several seats each ordered choice of different policies.

    If there are fewer policies than seats, policies also sit in several seats.
    """
    if len(policies) >= seats:
        return list(itertools.permutations(policies, seats))
    return list(itertools.product(policies, repeat=seats))


class Rows:
    """The rows of one shard's episodes; see Play."""

    def __init__(self, info: EnvironmentInfo, shard: Shard, policies: Mapping[str, Policy]) -> None:
        self._info = info
        self._shard = shard
        self._policies = [policies[name] for name in shard.lineup]
        self._indices = {seed: index for index, seed in enumerate(shard.seeds)}
        self._under_way: defaultdict[Episode, list[dict[str, Any]]] = defaultdict(list)
        self._ended: dict[int, list[dict[str, Any]]] = {}
        self._returns: dict[int, list[float]] = {}

    async def ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Ask the policy of each seat for the actions in the episodes where it is that seat's turn."""
        decisions: dict[Episode, Decision] = {}
        for seat, policy in enumerate(self._policies):
            turns = [episode for episode in episodes if episode.seat == seat]
            if turns:
                answers = await policy.act([episode.state for episode in turns], logprobs=True)
                decisions |= zip(turns, answers, strict=True)
        return [decisions[episode] for episode in episodes]

    def add(self, steps: Sequence[Step]) -> None:
        """See Play."""
        for episode, decision, result in steps:
            index, seat = self._indices[episode.seed], episode.seat
            self._under_way[episode].append(
                {
                    "episode": self._shard.first_episode + index,
                    "seed": episode.seed,
                    "step": episode.steps,
                    "policy": self._shard.lineup[seat],
                    "version": decision.version,
                    "state": self._state(episode.state),
                    "action": decision.action,
                    "logprob": decision.logprob,
                    "reward": result.reward if result.rewards is None else result.rewards[seat],
                    "terminated": result.status is StepStatus.TERMINATED,
                    "truncated": result.status is StepStatus.TRUNCATED,
                    "final_state": None if result.status is StepStatus.RUNNING else self._state(result.state),
                    "seat": seat,
                    "policies": self._shard.lineup,
                    "rewards": result.rewards,
                }
            )

    def end(self, episode: Episode) -> None:
        """Keep the rows of an episode that has ended; those of episodes that never end are not kept."""
        index = self._indices[episode.seed]
        self._ended[index] = self._under_way.pop(episode)
        self._returns[index] = episode.returns

    def write(self, path: Path, left_out: Mapping[int, str]) -> int:
        """Write the shard under a hidden name and rename it, so that readers see a whole file or none.

        Args:
            path: the file.
            left_out: by seed, why an episode has no rows.

        Returns:
            The number of rows.
        """
        rows = [row for _, rows in sorted(self._ended.items()) for row in rows]
        numbers = {self._shard.first_episode + self._indices[seed]: why for seed, why in left_out.items()}
        summary = {
            "lineup": self._shard.lineup,
            "returns": [returns for _, returns in sorted(self._returns.items())],
            "steps": len(rows),
            "left_out": {str(number): why for number, why in sorted(numbers.items())},
        }
        schema = self._schema.with_metadata({_SUMMARY: json.dumps(summary).encode()})
        partial = path.with_name(f".{path.name}.partial")
        pq.write_table(pa.Table.from_pylist(rows, schema), partial, compression="zstd")
        partial.replace(path)
        return len(rows)

    @property
    def _schema(self) -> pa.Schema:
        state_type = _nested(self._info.state.shape) if self._info.state.kind is StateKind.NUMBERS else _MESSAGES
        kinds = {ActionKind.INDEX: pa.int64(), ActionKind.TEXT: pa.string()}
        columns = {
            "episode": pa.int64(),
            "seed": pa.int64(),
            "step": pa.int32(),
            "policy": pa.string(),
            "version": pa.int64(),
            "state": state_type,
            "action": kinds.get(self._info.action.kind) or _nested(self._info.action.shape),
            "logprob": pa.float64(),
            "reward": pa.float64(),
            "terminated": pa.bool_(),
            "truncated": pa.bool_(),
            "final_state": state_type,
        }
        if self._info.seats > 1:
            columns |= {"seat": pa.int8(), "policies": pa.list_(pa.string()), "rewards": pa.list_(pa.float64())}
        return pa.schema(columns)

    def _state(self, state: Any) -> Any:
        return np.asarray(state, np.float64).tolist() if self._info.state.kind is StateKind.NUMBERS else list(state)


def _nested(shape: Sequence[int]) -> pa.DataType:
    kind = pa.float64()
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary that ``Rows.write`` wrote into the file's metadata.

    Raises:
        ValueError: the file is not a shard.
    """
    try:
        summary: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[_SUMMARY])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a shard of trajectories: {error!r}") from error
    return summary
