"""The client of the evaluation head, and functions as policies."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Response

from services.clients.evaluation_head import EvaluationHeadClient
from services.core.errors import DependencyLostError
from services.http.client import RETRIES, RequestRefusedError
from services.protocol.evaluation import EvaluateReply, EvaluateRequest
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS

ROOT = Path(__file__).parents[3]
MINE = "tests.services.evaluation_head.test_client"


def retries() -> float:
    return RETRIES.labels("evaluation-head")._value.get()


async def test_actions_come_in_order_with_versions_and_log_probabilities(head: Any, lean: Path, times: Path) -> None:
    with served_ready(head(head_policies=f"lean={lean} times={times}")) as url:
        async with EvaluationHeadClient(url) as client:
            reply = await client.act([[0.0, 0.0, 0.5, 0.0], [0.0, 0.0, -1.0, 0.0]], logprobs=True)
            assert (reply.actions, reply.policy_versions) == ([1, 0], [1, 1])
            assert reply.logprobs == pytest.approx([-math.log(1 + math.exp(-2 * x)) for x in (0.5, 1.0)], rel=1e-5)
            assert (await client.act([[0.0] * 4])).logprobs is None
        async with EvaluationHeadClient(url, policy="times") as client:
            reply = await client.act([[1.0, 2.0]], logprobs=True)
            assert (reply.actions, reply.logprobs) == ([[3.0, 6.0]], [None])
            with pytest.raises(RequestRefusedError, match="policy 'times' takes numbers of shape"):
                await client.act([[1.0]])


async def test_a_busy_head_is_asked_again_and_each_repetition_is_counted() -> None:
    app, requests, before = FastAPI(), [], retries()

    @app.post("/evaluate")
    async def evaluate(request: EvaluateRequest) -> Any:
        requests.append(request)
        if len(requests) < 3:
            return Response("{}", 503, {"Retry-After": "0"})
        return EvaluateReply(policy="zero", policy_versions=[1], actions=[0])

    with served(app) as url:
        async with EvaluationHeadClient(url) as client:
            assert (await client.act([[1.0]])).actions == [0]
            assert retries() - before == 2
            with pytest.raises(DependencyLostError, match="gave 1 actions for 2 states"):
                await client.act([[1.0], [2.0]])


def test_the_pages_agent_plays_cartpole(head: Any, lean: Path) -> None:
    page = (ROOT / "docs/evaluation_head.md").read_text()
    [block] = re.findall(r"^```python\n(\"\"\"Play CartPole .*?)^```$", page, re.MULTILINE | re.DOTALL)
    agent: dict[str, Any] = {"__name__": "head_agent"}
    exec(block, agent)
    with served_ready(head(head_policies=f"lean={lean}")) as url:
        returns = agent["asyncio"].run(agent["play"](url, range(1)))
        stats = httpx.get(f"{url}/stats", trust_env=False, timeout=IDLE_SECONDS).json()
    assert returns[0] > 100
    assert stats["episodes"] == {"active": 0, "finished": 1, "lost": 0}
    assert stats["returns"]["mean"] == returns[0]
    assert stats["servers"][0]["environment"] == "CartPole-v1"


def leave() -> None:
    sys.exit("enough")


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "too_many": (lambda: [2] * 4, "gave 4 actions"),
    "fails": (lambda: 1 // 0, "ZeroDivisionError"),
    "numpy_array": (lambda: np.arange(2), "gave array([0, 1])"),
    "nothing": (lambda: [None, None], "gave [None, None]"),
    "infinity": (lambda: [[0.5], [[-math.inf]]], "gave [[0.5], [[-inf]]]"),
    "leaves": (leave, "raised SystemExit: enough"),
    "no_text": (lambda: ["a", "\udce9"], r"gave ['a', '\udce9']"),
}
globals().update({name: lambda _states, answer=answer: answer() for name, (answer, _) in FAILURES.items()})


def say_two(states: list[Any]) -> list[int]:
    return [2 for _ in states]


async def test_a_function_is_a_policy_and_one_that_fails_gives_500(head: Any, serving: Any) -> None:
    policies = " ".join(f"{name}={MINE}:{name}" for name in ("say_two", *FAILURES))
    async with serving(head(head_policies=policies)) as client:
        for name, (_, says) in {"say_two": (None, None), **FAILURES}.items():
            reply = await client.post("/evaluate", json={"policy": name, "states": [[1], [2]]})
            if says is None:
                assert reply.json()["actions"] == [2, 2]
            else:
                assert (reply.status_code, says in reply.json()["detail"]) == (500, True), name
