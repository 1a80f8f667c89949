"""Episodes of policies in an environment of this process, one for each of many seeds, and the rows of their steps."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.clients.play import Decision, Episode, Step, play_at_once
from services.core.errors import ConfigurationError
from services.environment_server.catalogue import describe, open_with_trial
from services.environment_server.episodes import EpisodeTable
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.policies import Policy, keep_fresh, make_policy
from services.evaluation_head.settings import HeadSettings
from services.http.problems import ProblemError
from services.protocol.evaluation import Action, ActionKind, EnvironmentInfo, StateKind, StepResult, StepStatus

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SUMMARY = b"trajectories"


class LocalArena:
    """An environment of this process with the table of its episodes; see Arena."""

    def __init__(self, info: EnvironmentInfo, table: EpisodeTable) -> None:
        self.info = info
        self._table = table

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """See Arena."""
        return await asyncio.gather(*(self._begin(seed) for seed in seeds))

    async def _begin(self, seed: int) -> Episode:
        try:
            reply = await self._table.reset(1, seed)
        except ProblemError as error:
            return Episode.not_begun(seed, error.detail)
        return Episode.begun(reply.episodes[0], reply.environment)

    async def step(self, moves: Sequence[tuple[Episode, Action]]) -> list[StepResult]:
        """See Arena."""
        return await self._table.step([episode.step_with(action) for episode, action in moves])

    async def end(self, episodes: Sequence[Episode]) -> None:
        """See Arena."""
        await self._table.close([episode.id for episode in episodes if not episode.has_ended])


@asynccontextmanager
async def open_arena(environment: str | None) -> AsyncIterator[LocalArena]:
    """Yield an environment in this process.

    Raises:
        ConfigurationError: it cannot be made.
    """
    settings = EnvironmentSettings.load(environment=environment)
    async with AsyncExitStack() as stack:
        make, trial = await open_with_trial(settings, stack, "--environment")
        trial.close()
        info = describe(settings.environment, make, trial, settings.most_steps)
        table = EpisodeTable(info, make, settings.environment_step_seconds)
        stack.push_async_callback(table.end)
        yield LocalArena(info, table)


async def open_policies(
    stack: AsyncExitStack, text: str, info: EnvironmentInfo, at_once: int
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Open the policies of ``--policies`` until ``stack`` closes; return them and their targets by name.

    Raises:
        ConfigurationError: a policy cannot be loaded, or does not fit the environment.
    """
    size = os.environ.get("HEAD_BATCH_SIZE") or at_once
    # All episodes ask at the same time, so that no batch waits for more states.
    settings = {"head_batch_size": size, "head_llm_concurrency": at_once, "head_timeout_ms": 0.0}
    head = HeadSettings.load(head_policies=text.replace(",", " "), **settings)
    if not head.policies:
        raise ConfigurationError("--policies is empty; name policies, as a=policies/cartpole,b=http://127.0.0.1:30000")
    policies = {
        name: await stack.enter_async_context(make_policy(name, target, head)) for name, target in head.policies.items()
    }
    if misfits := [why for policy in policies.values() if (why := policy.misfit(info))]:
        raise ConfigurationError("; ".join(misfits))
    for policy in policies.values():
        # A version in a directory stays the one that was loaded; those of models that others serve are followed.
        if "file" not in policy.stats():
            stack.callback(asyncio.create_task(keep_fresh(policy)).cancel)
    return policies, head.policies


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


class Rows:
    """The rows of one shard's episodes, which it plays."""

    def __init__(self, info: EnvironmentInfo, shard: Shard, policies: Mapping[str, Policy]) -> None:
        self._info = info
        self._shard = shard
        self._policies = [policies[name] for name in shard.lineup]
        self._numbers = {seed: number for number, seed in enumerate(shard.seeds, start=shard.first_episode)}
        """By seed, the episode's number in the run."""
        self._under_way: defaultdict[Episode, list[dict[str, Any]]] = defaultdict(list)
        self._ended: dict[int, tuple[list[float], list[dict[str, Any]]]] = {}
        """By number, the return of each seat and the rows."""
        self.left_out: dict[int, str] = {}
        """By seed, why an episode has no rows."""

    async def play(self, arena: LocalArena, at_once: int) -> None:
        """Play the shard's episodes, ``at_once`` together, or of conversations as many each alone."""
        todo = deque(self._shard.seeds)

        def next_seeds(room: int) -> Sequence[int]:
            return [todo.popleft() for _ in range(min(room, len(todo)))]

        async def settle(episode: Episode) -> None:
            if episode.has_ended:
                # The rows of episodes that never end are not kept.
                self._ended[self._numbers[episode.seed]] = episode.returns, self._under_way.pop(episode)
            else:
                self.left_out[episode.seed] = str(episode.detail)

        size = min(at_once, len(todo))
        sizes = [1] * size if self._info.state.kind is StateKind.MESSAGES else [size]
        await play_at_once(sizes, arena, next_seeds, self._ask, settle, self._add)

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Ask the policy of each seat for the actions in the episodes where it is that seat's turn."""
        decisions: dict[Episode, Decision] = {}
        for seat, policy in enumerate(self._policies):
            turns = [episode for episode in episodes if episode.seat == seat]
            if turns:
                answers = await policy.act([episode.state for episode in turns], logprobs=True)
                decisions |= zip(turns, answers, strict=True)
        return [decisions[episode] for episode in episodes]

    def _add(self, steps: Sequence[Step]) -> None:
        for episode, decision, result in steps:
            seat = episode.seat
            self._under_way[episode].append(
                {
                    "episode": self._numbers[episode.seed],
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

    def write(self, path: Path) -> int:
        """Write the shard to a file, and return the number of rows.

        It is written under a hidden name and renamed, so that readers see a whole file or none.
        """
        ended = [self._ended[number] for number in sorted(self._ended)]
        rows = [row for _, rows in ended for row in rows]
        left_out = {str(self._numbers[seed]): why for seed, why in sorted(self.left_out.items())}
        summary = {"returns": [returns for returns, _ in ended], "steps": len(rows), "left_out": left_out}
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
    return functools.reduce(lambda kind, _: pa.list_(kind), shape, pa.float64())


def summary_of(path: Path) -> dict[str, Any]:
    """Return the summary that a shard's file has; see ``Rows.write``.

    Raises:
        ConfigurationError: the file is not a shard.
    """
    try:
        summary: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[_SUMMARY])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a file of trajectories: {error!r}; remove it and repeat") from error
    return summary
