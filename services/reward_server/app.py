"""The reward-server's routes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
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
from services.reward_server.judging import judge_of
from services.reward_server.pool import WorkerPool
from services.reward_server.scoring import NeuralReward, Scorer
from services.reward_server.settings import RewardSettings

log = get_logger(__name__)


def create_app(settings: RewardSettings) -> FastAPI:
    """Make the reward-server.

    Raises:
        ConfigurationError: a reward lacks a setting or a package that it needs.
    """
    _check(settings)
    for source, own in settings.by_source().items():
        if own.caution:
            log.warning(own.caution, source=source or None)
    pool = WorkerPool(settings)
    judge = judge_of(settings)
    code = CodeReward(settings) if "code" in settings.names else None
    scorers = settings.of_sources(lambda own, _: Scorer(own, pool, judge=judge, code=code))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if judge is not None:
                await stack.enter_async_context(judge.serving())
            if settings.reward_model is not None:
                neural = await _start_reward_model(settings, stack)
                for scorer in scorers.values():
                    scorer.neural = neural
            if code is not None:
                stack.push_async_callback(code.stop)
                await code.start()
            await pool.start()
            stack.push_async_callback(pool.stop)
            yield

    def health() -> Health:
        alive = not settings.worker_functions or pool.alive > 0
        return Health(status="healthy" if alive else "unhealthy", service="reward-server")

    def stats() -> dict[str, Any]:
        workers = {"pending": pool.pending, "workers_alive": pool.alive}
        answers = sum((scorer.counts for scorer in scorers.values()), Counter[str]())
        judged = {} if judge is None else {"judge": judge.figures.stats()}
        relative = [source for source, own in settings.by_source().items() if own.is_relative]
        of_rewards = {"reward_fn": settings.all_rewards, "relative": relative, "answers": dict(answers)}
        return {**of_rewards, **judged, **workers}

    app = create_service_app(
        "reward-server", settings=settings, lifespan=lifespan, health=health, stats=stats, description=__doc__ or ""
    )

    @app.post("/reward")
    async def post_reward(item: RewardItem) -> RewardResult:
        """Score one answer; ``reward`` is null where it could not be scored, and ``status`` says why."""
        return (await _score(scorers, [item]))[0]

    @app.post("/batch_reward")
    async def post_batch_reward(request: BatchRewardRequest) -> BatchRewardReply:
        """Score answers: one result an item, in order; ``is_group`` also compares them, where REWARD_FN does."""
        if request.is_group and request.items:
            [source] = _by_source(scorers, request.items)
            scored = await scorers[source].score(request.whole_items, is_group=True, own_rewards=request.own_rewards)
        else:
            scored = await _score(scorers, request.whole_items)
        return BatchRewardReply.model_construct(rewards=scored)

    return app


async def _score(scorers: Mapping[str, Scorer], items: Sequence[RewardItem]) -> list[RewardResult]:
    """Return one result an item, in order, by the REWARD_FN of its source.

    Raises:
        ProblemError: 422, there is no such source.
    """
    of_source = _by_source(scorers, items)
    scored = await asyncio.gather(*(scorers[source].score(chosen) for source, chosen in of_source.items()))
    results = {source: iter(results) for source, results in zip(of_source, scored, strict=True)}
    return [next(results[item.source]) for item in items]


def _by_source(scorers: Mapping[str, Scorer], items: Sequence[RewardItem]) -> dict[str, list[RewardItem]]:
    """Return the items by their source, each of which has a scorer.

    Raises:
        ProblemError: 422, there is no such source.
    """
    of_source: dict[str, list[RewardItem]] = {}
    for item in items:
        of_source.setdefault(item.source, []).append(item)
    if unknown := of_source.keys() - scorers.keys():
        raise unknown_source(min(unknown), scorers)
    return of_source


def _check(settings: RewardSettings) -> None:
    names = settings.names
    if ("reward_model" in names) != (settings.reward_model is not None):
        raise ConfigurationError("REWARD_MODEL and the reward `reward_model` in REWARD_FN need each other; set both")
    # Without this check a worker would report that REWARD_FN is wrong.
    if "math" in names and importlib.util.find_spec("math_verify") is None:
        raise ConfigurationError(f"the reward `math` needs math-verify; run: {install_command('reward')}")
    if "reasoning_gym" in names and importlib.util.find_spec("reasoning_gym") is None:
        command = install_command("reward", "reasoning-gym")
        raise ConfigurationError(f"the reward `reasoning_gym` needs reasoning-gym; run: {command}")


async def _start_reward_model(settings: RewardSettings, stack: AsyncExitStack) -> NeuralReward:
    """Load REWARD_MODEL and let it serve until ``stack`` closes; ConfigurationError where it cannot be loaded."""
    try:
        from services.reward_server.reward_model import RewardModel
    except ImportError as error:
        raise ConfigurationError(
            f"REWARD_MODEL needs torch and transformers ({error}); run: {install_command('reward', 'reward-model')}"
        ) from error
    name = settings.reward_model
    assert name is not None
    model = await in_background(lambda: RewardModel(name, max_tokens=settings.reward_model_max_tokens))
    await stack.enter_async_context(model.serving())
    return model.score
