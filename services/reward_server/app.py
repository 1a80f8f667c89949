"""The reward-server's routes."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.http.app import create_service_app
from services.protocol.base import Health
from services.protocol.rewards import BatchRewardReply, BatchRewardRequest, RewardItem, RewardResult
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
    if settings.caution:
        log.warning(settings.caution)
    pool = WorkerPool(settings)
    scorer = Scorer(settings, pool)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if settings.reward_model is not None:
                scorer.neural = await _start_reward_model(settings, stack)
            await pool.start()
            stack.push_async_callback(pool.stop)
            yield

    def health() -> Health:
        alive = not settings.worker_functions or pool.alive > 0
        return Health(status="healthy" if alive else "unhealthy", service="reward-server")

    def stats() -> dict[str, Any]:
        workers = {"pending": pool.pending, "workers_alive": pool.alive}
        return {"reward_fn": settings.reward_fn, "answers": dict(scorer.counts), **workers}

    app = create_service_app(
        "reward-server", settings=settings, lifespan=lifespan, health=health, stats=stats, description=__doc__ or ""
    )

    @app.post("/reward")
    async def post_reward(item: RewardItem) -> RewardResult:
        """Score one answer; ``reward`` is null where it could not be scored, and ``status`` says why."""
        return (await scorer.score([item]))[0]

    @app.post("/batch_reward")
    async def post_batch_reward(request: BatchRewardRequest) -> BatchRewardReply:
        """Score answers: one result an item, in order."""
        return BatchRewardReply.model_construct(rewards=await scorer.score(request.whole_items))

    return app


def _check(settings: RewardSettings) -> None:
    names = {function.name for function in settings.functions}
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
