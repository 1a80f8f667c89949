"""The reward-server's routes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.tasks import in_background
from services.http.app import create_service_app, model_response
from services.protocol import BatchRewardReply, BatchRewardRequest, Health, RewardItem, RewardResult
from services.reward_server.pool import WorkerPool
from services.reward_server.scoring import NeuralReward, Scorer
from services.reward_server.settings import BUILT_IN, RewardSettings


def create_app(settings: RewardSettings) -> FastAPI:
    """The reward-server.

    Raises:
        ConfigurationError: a reward lacks a setting or a package that it needs.
    """
    names = {function.name for function in settings.functions}
    if "overlong" in names:
        _check_overlong(settings)
    if ("reward_model" in names) != (settings.reward_model is not None):
        raise ConfigurationError("REWARD_MODEL and the reward `reward_model` in REWARD_FN need each other; set both")
    if "math" in names and importlib.util.find_spec("math_verify") is None:
        # A worker would say that REWARD_FN is wrong.
        raise ConfigurationError(f"the reward `math` needs math-verify; run: {install_command('reward')}")
    in_workers = [n for n in sorted(names) if n in ("math", "format") or n not in BUILT_IN]
    pool = WorkerPool(in_workers, settings)
    held: list[Scorer] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with _neural(settings) as neural:
            await pool.start()
            held.append(Scorer(settings, pool, neural))
            try:
                yield
            finally:
                await pool.stop()

    def health() -> Health:
        alive = not in_workers or pool.alive > 0
        return Health(status="healthy" if alive else "unhealthy", service="reward-server")

    def stats() -> dict[str, Any]:
        return {
            "reward_fn": settings.reward_fn,
            "answers": dict(held[0].counts),
            "pending": pool.pending,
            "workers_alive": pool.alive,
        }

    app = create_service_app(
        "reward-server",
        settings=settings,
        lifespan=lifespan,
        health=health,
        stats=stats,
        description=__doc__ or "",
    )

    @app.post("/reward", response_model=RewardResult)
    async def post_reward(item: RewardItem) -> Response:
        """Scores one answer; ``reward`` is null where it could not be scored, and ``status`` says why."""
        return model_response((await held[0].score([item]))[0])

    @app.post("/batch_reward", response_model=BatchRewardReply)
    async def post_batch_reward(request: BatchRewardRequest) -> Response:
        """Scores answers: one result an item, in order."""
        return model_response(BatchRewardReply.model_construct(rewards=await held[0].score(request.items)))

    return app


def _check_overlong(settings: RewardSettings) -> None:
    longest, buffer = settings.reward_overlong_max_tokens, settings.reward_overlong_buffer_tokens
    if longest is None or buffer is None or buffer > longest:
        raise ConfigurationError(
            f"the reward `overlong` needs REWARD_OVERLONG_MAX_TOKENS (is {longest}) and, not larger, "
            f"REWARD_OVERLONG_BUFFER_TOKENS (is {buffer})"
        )


@asynccontextmanager
async def _neural(settings: RewardSettings) -> AsyncIterator[NeuralReward | None]:
    name = settings.reward_model
    if name is None:
        yield None
        return

    def load() -> Any:
        try:
            from services.reward_server.reward_model import RewardModel
        except ImportError as error:
            raise ConfigurationError(
                f"REWARD_MODEL needs torch and transformers ({error}); run: {install_command('reward', 'reward-model')}"
            ) from error
        return RewardModel(name, batch_size=settings.reward_model_batch, max_tokens=settings.reward_model_max_tokens)

    model = await in_background(load)
    model.start()
    try:
        yield model.score
    finally:
        await asyncio.shield(model.stop())
