"""The player: each episode is reported once, and a restart of the head loses none."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from services.environment_server import app as player
from services.protocol.evaluation import EvaluateReply, EvaluateRequest
from tests.services.environment_server.conftest import ODD
from tests.services.run_page.serving import served
from tests.waiting import eventually, stats_show


class Head:
    """A fake head that answers 0, records requests, and fails when ``failing`` is set."""

    def __init__(self) -> None:
        self.requests: list[EvaluateRequest] = []
        self.failing = False
        self.action: Any = 0
        self.app = FastAPI()

        @self.app.post("/evaluate")
        async def evaluate(request: EvaluateRequest) -> Any:
            if self.failing:
                return JSONResponse({"detail": "not now"}, 503, {"Retry-After": "0"})
            self.requests.append(request)
            count = len(request.all_states)
            return EvaluateReply(policy="zero", policy_versions=[1] * count, actions=[self.action] * count)

    @property
    def finished(self) -> list[Any]:
        return [report for request in self.requests for report in request.finished]


@pytest.fixture
def head() -> Head:
    return Head()


async def test_episodes_are_played_and_each_is_reported_once(serving: Any, app: Any, head: Head) -> None:
    with served(head.app) as url:
        options = {"environment": f"{ODD}Plain-v0", "environment_max_steps": 3, "eval_head_endpoint": url}
        async with serving(app(**options, environment_push_episodes=4, environment_push_total=10)) as client:
            await eventually(lambda: len(head.finished) == 10, "episodes", progress=lambda: len(head.requests))
            stats = (await client.get("/stats")).json()
            assert (await client.get("/health")).json()["pushing"] is True
    assert sorted(report.seed for report in head.finished) == list(range(10))
    assert {(report.steps, report.episode_return) for report in head.finished} == {(3, 3.0)}
    assert len({report.episode for report in head.finished}) == 10
    assert (stats["push"]["finished"], stats["push"]["trouble"], stats["active"]) == (10, None, 0)
    positions = [position for request in head.requests for position in request.episodes or []]
    assert {(p.step, p.episode_return) for p in positions} == {(0, 0.0), (1, 1.0), (2, 2.0)}
    assert len({request.instance_key for request in head.requests}) == 1
    assert {request.server for request in head.requests} == {"test-server"}


async def test_a_head_that_is_away_costs_no_episode(
    serving: Any, app: Any, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(player, "PAUSE_SECONDS", 0.05)
    with served(head.app) as url:
        options = {"environment": f"{ODD}Plain-v0", "environment_max_steps": 50, "eval_head_endpoint": url}
        async with serving(app(**options, environment_push_episodes=2, environment_push_total=2)) as client:
            await eventually(lambda: len(head.requests) > 5)
            head.failing = True
            await stats_show(client, lambda stats: stats["push"]["trouble"] is not None)
            head.failing = False
            # A report whose answer is late comes again.
            await eventually(
                lambda: len({report.episode for report in head.finished}) == 2,
                "episodes",
                progress=lambda: len(head.requests),
            )
            push = (await stats_show(client, lambda stats: stats["push"]["trouble"] is None))["push"]
    assert {report.steps for report in head.finished} == {50}
    assert (push["lost"], push["trouble"]) == (0, None)


async def test_an_action_that_does_not_fit_loses_the_episode(serving: Any, app: Any, head: Head) -> None:
    head.action = 99
    with served(head.app) as url:
        options = {"environment": "CartPole-v1", "eval_head_endpoint": url, "environment_push_total": 2}
        async with serving(app(**options)) as client:
            await eventually(lambda: bool(head.requests))
            stats = await stats_show(client, lambda stats: stats["push"]["lost"] == 2)
    assert "takes Discrete(2)" in stats["push"]["trouble"]
    assert stats["active"] == 0
    assert head.finished == []
