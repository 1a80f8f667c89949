"""A whole job group in this process: the real services on ports of this machine, engines, and the trainer's ``train``.

Only sglang-router and the launchers are replaced, by a few routes that pass requests on. A fault is a patch of the
product's own code, which acts in every component because they share the process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import httpx
from fastapi import FastAPI, Request, Response

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, ROUTER_PORT, Task
from services.data_server.app import create_app as data_server
from services.data_server.settings import DataSettings
from services.embedded_engine.app import create_app as embedded_engine
from services.engines.settings import EngineSettings
from services.environment_server.app import create_app as environment_server
from services.environment_server.settings import EnvironmentSettings
from services.gateway.app import create_app as gateway
from services.gateway.settings import GatewaySettings
from services.replay_buffer.app import create_app as replay_buffer
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.app import create_app as reward_server
from services.reward_server.settings import RewardSettings
from services.run_page.directory import Run
from tests.ports import free_ports
from tests.services.run_page.serving import served, served_ready
from trainer.config import TrainerSettings
from trainer.model.ranks import join_ranks
from trainer.run import StopSignal, train

SETTINGS = {
    "DATASET": "arithmetic",
    "DATASET_CONFIG": '{"template": "{a}{op}{b}="}',
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "exact_match",
    "REWARD_WORKERS": "1",
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_STEPS": "12",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPT_TOKENS": "64",
    "ENGINE_MAX_TOTAL_TOKENS": "4096",
    "LEARNING_RATE": "1e-4",
    "EVAL_PROMPTS": "8",
    "RECORD_GROUPS": "off",
    "CHECKPOINT_EVERY": "0",
    "HF_HUB_OFFLINE": "1",
}
"""The run of the museum: 12 steps of 8 sums, each answered 8 times; seconds on one core."""


FRESH = httpx.Limits(max_keepalive_connections=0)
"""An idle connection may be closed at the other end just when it is used again."""


def run_job(directory: Path, model: Path, *, engines: int = 1, **variables: str) -> Run:
    """Train to the end, and return the run.

    Args:
        directory: its shared volume.
        model: the model's directory.
        engines: the embedded engines behind the router.
        variables: settings of its components, as ``--env`` gives them.

    Raises:
        Exception: what ended the trainer.
    """
    chosen = SETTINGS | {"MODEL_NAME": str(model), "SHARED_DIR": str(directory), "RUN_ID": "r"} | variables
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, chosen))
        # Workers of the reward-server would import the program of this process, and all that it imports.
        stack.enter_context(mock.patch.dict(vars(sys.modules["__main__"]), {"__spec__": None, "__file__": None}))
        _serve(stack, engines, plays=bool({"AGENT", "ENVIRONMENT"} & chosen.keys()))
        with join_ranks() as ranks:
            train(TrainerSettings.load(), ranks, StopSignal())
    return Run(directory / "runs" / "r")


def _serve(stack: ExitStack, engines: int, *, plays: bool) -> None:
    """Start the components until the stack ends, and have clients find them."""
    addresses: dict[str, str] = {}

    def name(task: Task, url: str, port: int | None = None) -> None:
        addresses[f"{task.value}-0:{port or PORTS[task][0]}"] = url.removeprefix("http://")
        stack.enter_context(mock.patch.dict(os.environ, {ENDPOINTS_VARIABLE: json.dumps(addresses)}))

    for port, free in zip((*PORTS[Task.TRAINER],), free_ports(3), strict=True):
        name(Task.TRAINER, f"127.0.0.1:{free}", port)
    name(Task.DATA_SERVER, stack.enter_context(served_ready(data_server(DataSettings.load()))))
    name(Task.REWARD_SERVER, stack.enter_context(served_ready(reward_server(RewardSettings.load()))))
    name(Task.REPLAY_BUFFER, stack.enter_context(served_ready(replay_buffer(ReplaySettings.load()))))
    urls = [stack.enter_context(served_ready(embedded_engine(EngineSettings.load()))) for _ in range(engines)]
    name(Task.ROLLOUT_SERVER, stack.enter_context(served(_router(urls))), ROUTER_PORT)
    if "ENVIRONMENT" in os.environ:
        settings = EnvironmentSettings.load()
        name(Task.ENVIRONMENT_SERVER, stack.enter_context(served_ready(environment_server(settings))))
    if plays:
        name(Task.GATEWAY, stack.enter_context(served_ready(gateway(GatewaySettings.load()))))


def _router(engines: list[str]) -> FastAPI:
    """Return a router in front of engines, which get the requests in turn; one that is taken out stays out."""
    app, turns, left = FastAPI(), itertools.count(), list(engines)
    http = httpx.AsyncClient(timeout=600, trust_env=False, limits=FRESH)

    @app.get("/workers")
    async def workers() -> dict[str, object]:
        return {"workers": [{"id": u, "url": u, "is_healthy": True, "metadata": {"engine": "embedded"}} for u in left]}

    @app.delete("/workers/{worker:path}")
    async def removed(worker: str) -> None:
        left.remove(worker)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def passed_on(path: str, request: Request) -> Response:
        url = f"{left[next(turns) % len(left)]}/{path}"
        reply = await http.request(
            request.method, url, content=await request.body(), headers={"content-type": "application/json"}
        )
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

    return app
