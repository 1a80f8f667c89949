"""The reward-server's routes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.http.app import create_service_app
from services.http.problems import unknown_source
from services.protocol.base import Health
from services.protocol.rewards import BatchRewardReply, BatchRewardRequest, RewardItem, RewardResult
from services.reward_server.code import CodeReward
from services.reward_server.judging import START_SECONDS, judge_of
from services.reward_server.pool import WorkerPool
from services.reward_server.scoring import Functions, Scorer
from services.reward_server.settings import RewardSettings

log = get_logger(__name__)

_PACKAGES = (("math", "math_verify", ("reward",)), ("reasoning_gym", "reasoning_gym", ("reward", "reasoning-gym")))
"""Rewards whose packages need not be installed, with the extras of this project that have them."""


class Rewards:
    """The scorers of all sources, and the workers and models that they share."""

    def __init__(self, settings: RewardSettings, judge_seconds: float = START_SECONDS) -> None:
        """Make them; ``serving`` starts them, and waits ``judge_seconds`` for a judge."""
        self.settings = settings
        self._judge_seconds = judge_seconds
        self.pool = WorkerPool(settings)
        self.judge = judge_of(settings)
        self._shared: Functions = {}
        self.scorers = settings.of_sources(lambda own, _: Scorer(own, self.pool, self.judge, self._shared))

    @asynccontextmanager
    async def serving(self, _app: FastAPI) -> AsyncIterator[None]:
        """Load and start everything that scores, and stop it when the context ends."""
        async with AsyncExitStack() as stack:
            if self.judge is not None:
                await stack.enter_async_context(self.judge.serving(self._judge_seconds))
            if self.settings.reward_model is not None:
                await self._start_reward_model(self.settings.reward_model, stack)
            if "code" in self.settings.names:
                code = CodeReward(self.settings)
                stack.push_async_callback(code.stop)
                await code.start()
                self._shared["code"] = code.score
            await self.pool.start()
            stack.push_async_callback(self.pool.stop)
            yield

    async def _start_reward_model(self, name: str, stack: AsyncExitStack) -> None:
        """Load a model and let it serve until ``stack`` closes; ConfigurationError where it cannot be loaded."""
        try:
            from services.reward_server.reward_model import RewardModel
        except ImportError as error:
            command = install_command("reward", "reward-model")
            raise ConfigurationError(f"REWARD_MODEL needs torch and transformers ({error}); run: {command}") from error
        model = await in_background(lambda: RewardModel(name))
        await stack.enter_async_context(model.serving())
        self._shared["reward_model"] = model.score

    def health(self) -> Health:
        """Return whether a worker lives, or none is needed."""
        alive = not self.settings.worker_functions or self.pool.alive > 0
        return Health(status="healthy" if alive else "unhealthy", service="reward-server")

    def stats(self) -> dict[str, Any]:
        """Return the rewards, the numbers of answers by status, and the state of judge and workers."""
        workers = {"pending": self.pool.pending, "workers_alive": self.pool.alive}
        answers = sum((scorer.counts for scorer in self.scorers.values()), Counter[str]())
        judged = {} if self.judge is None else {"judge": self.judge.counts}
        relative = [source for source, own in self.settings.by_source().items() if own.is_relative]
        of_rewards = {"reward_fn": self.settings.all_rewards, "relative": relative, "answers": dict(answers)}
        return {**of_rewards, **judged, **workers}

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return one result an item, in order, by the REWARD_FN of its source.

        Raises:
            ProblemError: 422, there is no such source.
        """
        of_source = self.by_source(items)
        scored = await asyncio.gather(*(self.scorers[source].score(chosen) for source, chosen in of_source.items()))
        results = {source: iter(results) for source, results in zip(of_source, scored, strict=True)}
        return [next(results[item.source]) for item in items]

    def by_source(self, items: Sequence[RewardItem]) -> dict[str, list[RewardItem]]:
        """Return the items by their source, each of which has a scorer.

        Raises:
            ProblemError: 422, there is no such source.
        """
        of_source: dict[str, list[RewardItem]] = {}
        for item in items:
            of_source.setdefault(item.source, []).append(item)
        if unknown := of_source.keys() - self.scorers.keys():
            raise unknown_source(min(unknown), self.scorers)
        return of_source


def create_app(settings: RewardSettings) -> FastAPI:
    """Make the reward-server.

    Raises:
        ConfigurationError: a reward lacks a setting or a package that it needs.
    """
    _check(settings)
    for source, own in settings.by_source().items():
        if own.caution:
            log.warning(own.caution, source=source or None)
    rewards = Rewards(settings)
    app = create_service_app(
        "reward-server",
        settings=settings,
        lifespan=rewards.serving,
        health=rewards.health,
        stats=rewards.stats,
        description=__doc__ or "",
    )

    @app.post("/reward")
    async def post_reward(item: RewardItem) -> RewardResult:
        """Score one answer; ``reward`` is null where it could not be scored, and ``status`` says why."""
        return (await rewards.score([item]))[0]

    @app.post("/batch_reward")
    async def post_batch_reward(request: BatchRewardRequest) -> BatchRewardReply:
        """Score answers: one result an item, in order; ``is_group`` also compares them, where REWARD_FN does."""
        if request.is_group and request.items:
            [source] = rewards.by_source(request.items)
            scorer = rewards.scorers[source]
            scored = await scorer.score(request.whole_items, is_group=True, own_rewards=request.own_rewards)
        else:
            scored = await rewards.score(request.whole_items)
        return BatchRewardReply.model_construct(rewards=scored)

    return app


def _check(settings: RewardSettings) -> None:
    names = settings.names
    if ("reward_model" in names) != (settings.reward_model is not None):
        raise ConfigurationError("REWARD_MODEL and the reward `reward_model` in REWARD_FN need each other; set both")
    # Without this check a worker would report that REWARD_FN is wrong.
    for name, package, extras in _PACKAGES:
        if name in names and importlib.util.find_spec(package) is None:
            needed = package.replace("_", "-")
            raise ConfigurationError(f"the reward `{name}` needs {needed}; run: {install_command(*extras)}")
