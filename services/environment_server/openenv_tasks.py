"""OpenEnv's task routes: the splits and numbered tasks of an environment that has them, 501 where it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import Field

from services.core.tasks import in_background
from services.environment_server.environments import Tasks
from services.environment_server.openenv_sessions import Sessions
from services.http.app import JsonResponse
from services.http.problems import ProblemError
from services.protocol.base import StrictModel

MAX_TASKS = 10_000
"""Most tasks in one reply."""


class SplitRequest(StrictModel):
    """Body of POST /{env}/tasks and /{env}/num_tasks."""

    split: str


class TaskRequest(SplitRequest):
    """Body of POST /{env}/task."""

    index: int = Field(ge=0)


class TaskRangeRequest(SplitRequest):
    """Body of POST /{env}/task_range: the tasks from ``start`` to ``stop`` (exclusive)."""

    start: int | None = Field(default=None, ge=0)
    stop: int | None = Field(default=None, ge=0)


def add_task_routes(app: FastAPI, sessions: Callable[[], Sessions]) -> None:
    """Add the task routes to a service; ``sessions`` returns the server's sessions once it is ready."""

    @app.get("/list_environments", tags=["openenv tasks"], response_model=list[str])
    async def get_environments() -> Response:
        """Return the name of the environment."""
        return JsonResponse([sessions().table.info.id])

    @app.get("/{environment:path}/splits", tags=["openenv tasks"], response_model=list[dict[str, Any]])
    async def get_splits(environment: str) -> Response:
        """Return the splits."""
        tasks = _tasks(sessions(), environment)
        kinds = ("train", "validation", "test")
        return JsonResponse([{"name": s, "type": s if s in kinds else "validation"} for s in tasks.splits])

    @app.post("/{environment:path}/num_tasks", tags=["openenv tasks"], response_model=dict[str, Any])
    async def post_num_tasks(environment: str, request: SplitRequest) -> Response:
        """Return the number of tasks of a split."""
        return JsonResponse({"num_tasks": _size(_tasks(sessions(), environment), request.split)})

    @app.post("/{environment:path}/tasks", tags=["openenv tasks"], response_model=dict[str, Any])
    async def post_tasks(environment: str, request: SplitRequest) -> Response:
        """Return all tasks of a split, without their solutions."""
        tasks = await _describe(_tasks(sessions(), environment), request.split, 0, None)
        return JsonResponse({"tasks": tasks, "env_name": sessions().table.info.id})

    @app.post("/{environment:path}/task_range", tags=["openenv tasks"], response_model=dict[str, Any])
    async def post_task_range(environment: str, request: TaskRangeRequest) -> Response:
        """Return a range of a split's tasks."""
        tasks = _tasks(sessions(), environment)
        return JsonResponse({"tasks": await _describe(tasks, request.split, request.start or 0, request.stop)})

    @app.post("/{environment:path}/task", tags=["openenv tasks"], response_model=dict[str, Any])
    async def post_task(environment: str, request: TaskRequest) -> Response:
        """Return one task."""
        tasks = _tasks(sessions(), environment)
        if request.index >= (size := _size(tasks, request.split)):
            raise ProblemError(400, f"index is {request.index}; {request.split} has {size} tasks")
        return JsonResponse({"task": await in_background(lambda: tasks.describe(request.split, request.index))})


def _tasks(sessions: Sessions, environment: str) -> Tasks:
    """Return the tasks of the environment that a path names.

    Raises:
        ProblemError: 404 for another environment, 501 where it has no tasks.
    """
    name = sessions.table.info.id
    if environment.lower() != name.lower():
        raise ProblemError(404, f"unknown environment {environment[:100]!r}; this server hosts {name!r}")
    if sessions.tasks is None:
        raise ProblemError(501, f"{name!r} has no numbered tasks; a reset's seed chooses the episode")
    return sessions.tasks


def _size(tasks: Tasks, split: str) -> int:
    if split not in tasks.splits:
        raise ProblemError(400, f"split is {split[:60]!r}; there are {', '.join(tasks.splits)}")
    return tasks.splits[split]


async def _describe(tasks: Tasks, split: str, start: int, stop: int | None) -> list[dict[str, Any]]:
    size = _size(tasks, split)
    indices = range(size)[start:stop]
    if len(indices) > MAX_TASKS:
        raise ProblemError(400, f"{len(indices)} tasks; ask for {MAX_TASKS} at a time by task_range")
    return await in_background(lambda: [tasks.describe(split, index) for index in indices])
