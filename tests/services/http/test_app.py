from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from services.core.errors import ConfigurationError
from services.core.settings import Settings
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app
from services.http.json_body import MAX_DEPTH, json_depth
from services.http.problems import PROBLEM_MEDIA_TYPE, ProblemError
from services.http.server import listen
from services.protocol.base import ComponentRecord
from services.protocol.rewards import RewardItem, RewardResult
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, eventually, wait_ready, wait_until

JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def nothing(_app: FastAPI) -> AsyncIterator[None]:
    yield


def make_app(*, token: str | None = None, lifespan: Any = nothing, **options: Any) -> FastAPI:
    settings = Settings(jobgroup_token=SecretStr(token) if token else None)
    app = create_service_app("test-service", settings=settings, lifespan=lifespan, **options)

    @app.post("/echo", response_model=RewardResult)
    async def echo(item: RewardItem) -> RewardResult:
        return RewardResult(reward=float(len(item.response)))

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("secret detail")

    @app.get("/refuse")
    async def refuse() -> None:
        raise ProblemError(409, "not now; wait", retry_in=3)

    return app


def is_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


async def test_health_is_503_and_routes_refuse_until_the_service_has_loaded() -> None:
    loaded = asyncio.Event()

    @asynccontextmanager
    async def slow(_app: FastAPI) -> AsyncIterator[None]:
        await loaded.wait()
        yield

    app = make_app(lifespan=slow)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        starting = await client.get("/health")
        assert (starting.status_code, starting.json()["status"]) == (503, "starting")
        refused = await client.get("/stats")
        is_problem(refused, 503)
        assert refused.headers["retry-after"]
        loaded.set()
        await wait_ready(app)
        healthy = await client.get("/health")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "healthy")
        assert (await client.get("/stats")).status_code == 200
        app.state.lifecycle.draining.set()
        assert (await client.get("/health")).status_code == 503


async def test_what_a_load_fails_with_reaches_whoever_waits() -> None:
    @asynccontextmanager
    async def failing(_app: FastAPI) -> AsyncIterator[None]:
        raise ConfigurationError("no such dataset")
        yield

    app = make_app(lifespan=failing)
    async with app.router.lifespan_context(app):
        with pytest.raises(ConfigurationError, match="no such dataset"):
            await wait_ready(app)


async def test_every_refusal_is_a_problem_document(serving: Any) -> None:
    async with serving(make_app()) as client:
        assert "/nowhere" in is_problem(await client.get("/nowhere"), 404)["detail"]
        not_allowed = await client.get("/echo")
        is_problem(not_allowed, 405)
        assert not_allowed.headers["allow"] == "POST"
        invalid = is_problem(await client.post("/echo", json={"prompt": "a"}), 422)
        assert {e["where"] for e in invalid["errors"]} == {"body.response", "body.ground_truth"}
        is_problem(await client.post("/echo", content=b"{", headers=JSON), 400)
        is_problem(await client.post("/echo", content=b"a=b"), 415)
        assert is_problem(await client.get("/refuse"), 409)["retry_in"] == 3
        broken = is_problem(await client.get("/broken"), 500)
        assert "secret detail" not in str(broken)


async def test_a_refusal_does_not_repeat_the_input(serving: Any) -> None:
    async with serving(make_app()) as client:
        response = await client.post("/echo", json={"prompt": {"password": "hunter2"}, "response": 1})
        assert "hunter2" not in response.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "response": "b", "ground_truth": NaN}',
        b'{"prompt": "a", "response": "b", "ground_truth": "c", "completion_tokens": 1e999}',
        b'{"prompt": "\\ud800", "response": "b", "ground_truth": "c"}',
        b'{"prompt": "\xed\xa0\x80", "response": "b", "ground_truth": "c"}',
        b'{"prompt": "\xff", "response": "b", "ground_truth": "c"}',
        b'{"prompt": "a", "response": "b", "ground_truth": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"[" * 100_000,
        b'{"a": "' + b"\\" * 99_999,
        b"",
    ],
    ids=["nan", "infinite", "surrogate", "encoded surrogate", "not utf-8", "deep", "very deep", "unended", "empty"],
)
async def test_bodies_that_are_not_plain_json_are_refused(serving: Any, body: bytes) -> None:
    async with serving(make_app()) as client:
        response = await client.post("/echo", content=body, headers=JSON)
        is_problem(response, response.status_code)
        assert response.status_code in (400, 422)


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_announced_or_not(serving: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    async with serving(make_app(max_body_bytes=10_000)) as client:
        is_problem(await client.post("/echo", content=b" " * 10_001, headers=JSON), 413)
        is_problem(await client.post("/echo", content=endless(), headers=JSON), 413)
        item = {"prompt": "", "response": "b" * 5000, "ground_truth": ""}
        assert (await client.post("/echo", json=item)).json()["reward"] == 5000


async def test_with_a_token_everything_but_health_asks_for_it(serving: Any) -> None:
    app = make_app(token="right")
    async with serving(app) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/stats", "/metrics", "/openapi.json", "/docs", "/nowhere"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
                refused = await client.get(path, headers=headers)
                is_problem(refused, 401)
                assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/stats", headers={"Authorization": "Bearer right"})).status_code == 200
        # Not even read before the token is seen.
        refused = await client.post("/echo", content=b"[" * 100_000, headers=JSON)
        is_problem(refused, 401)
    async with serving(make_app(token="right"), token="right") as client:
        page = (await client.get("/openapi.json")).json()
        assert page["security"] == [{"token": []}]
        assert page["paths"]["/health"]["get"]["security"] == []


async def test_settings_are_told_without_secrets_and_with_what_they_run_on(serving: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOG_LEVEL", "warning")
    async with serving(make_app(token="hush")) as client:
        assert (await client.get("/settings")).status_code == 401
        reply = await client.get("/settings", headers={"Authorization": "Bearer hush"})
    record = ComponentRecord.model_validate_json(reply.content)
    assert "hush" not in reply.text
    assert record.settings["log_level"] == "warning"
    assert record.changed == ["jobgroup_token", "log_level"]
    assert {"python", "skypilot-grpo"} <= record.packages.keys()
    in_checkout = (Path(__file__).parents[3] / ".git").exists()
    assert (record.commit is not None) == in_checkout


async def test_metrics_count_requests_by_route_and_never_by_what_clients_make_up(serving: Any) -> None:
    async with serving(make_app()) as client:
        await client.get("/stats")
        await client.get("/made/up")
        await client.request("BREW", "/stats")
        metrics = (await client.get("/metrics")).text
        assert 'http_requests_total{method="GET",route="/stats",service="test-service",status="200"}' in metrics
        assert 'route="unmatched"' in metrics
        assert "/made/up" not in metrics
        assert "BREW" not in metrics
        assert "http_request_duration_seconds_bucket" in metrics


def test_depth_is_counted_outside_strings_and_in_linear_time() -> None:
    assert json_depth(b"1") == 0
    assert json_depth(b'{"a": [1, {"b": "[[[["}]}') == 3
    assert json_depth(rb'["\"[[", "\\", []]') == 2
    assert json_depth(b"[" * (MAX_DEPTH + 1)) == MAX_DEPTH + 1
    # Processor time of this thread: no other process adds to it. What took quadratic time would take minutes.
    started = time.thread_time()
    json_depth(b'"\\' * 500_000)
    json_depth(b"[]" * 500_000)
    assert time.thread_time() - started < 5


SLOW_SERVICE = """
import asyncio, sys, time
from contextlib import asynccontextmanager
from pathlib import Path
from services.core import endpoints
from services.core.errors import ConfigurationError
from services.core.errors import DependencyLostError
from services.core.settings import Settings
from services.http.app import create_service_app
from services.core.tasks import in_background
from services.http.server import run_service

class SlowSettings(Settings):
    load_seconds: float = 0
    failure: str = ""

def create_app(settings):
    @asynccontextmanager
    async def lifespan(app):
        await in_background(lambda: time.sleep(settings.load_seconds))
        if settings.failure == "configuration":
            raise ConfigurationError("THING is 'x'; set it to y")
        yield

    app = create_service_app("slow", settings=settings, lifespan=lifespan)

    @app.get("/slow")
    async def slow():
        print("asked", flush=True)
        await asyncio.sleep(1.0)
        return {"done": True}

    @app.get("/lose")
    async def lose():
        app.state.lifecycle.fail(DependencyLostError("the engine is gone"))
        return {}

    return app

sys.exit(run_service(create_app, endpoints.Task.REWARD_SERVER, SlowSettings))
"""


@pytest.fixture(scope="module")
def slow_service(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = tmp_path_factory.mktemp("script") / "slow_service.py"
    script.write_text(SLOW_SERVICE)
    return str(script)


async def test_sigterm_lets_a_request_end_and_exits_with_0(start_service: Any, slow_service: str) -> None:
    service = start_service(slow_service, PYTHONPATH=".")
    async with httpx.AsyncClient(base_url=service.url, timeout=IDLE_SECONDS) as client:
        request = asyncio.create_task(client.get("/slow"))
        await eventually(lambda: "asked" in service.log, "the request has come", told=lambda: service.log)
        exit_code = asyncio.create_task(asyncio.to_thread(service.terminate))
        assert (await request).json() == {"done": True}
        assert await exit_code == 0


def test_sigterm_ends_a_service_that_is_still_loading(start_service: Any, slow_service: str) -> None:
    service = start_service(slow_service, PYTHONPATH=".", LOAD_SECONDS="600", healthy=False)
    wait_until(lambda: "listening" in service.log, "the service listens", told=lambda: service.log)
    # Its answer shows that it handles signals.
    assert httpx.get(f"{service.url}/health", timeout=IDLE_SECONDS, trust_env=False).status_code == 503
    assert service.terminate() == 0


def test_a_configuration_that_cannot_work_exits_with_78_and_one_line(start_service: Any, slow_service: str) -> None:
    service = start_service(slow_service, PYTHONPATH=".", FAILURE="configuration", LOG_LEVEL="warning", healthy=False)
    assert service.process.wait(LIMIT_SECONDS) == 78
    assert service.log == "error: THING is 'x'; set it to y\n"
    invalid = start_service(slow_service, PYTHONPATH=".", LOAD_SECONDS="soon", healthy=False)
    assert invalid.process.wait(LIMIT_SECONDS) == 78
    assert invalid.log.startswith("error: LOAD_SECONDS is 'soon'")
    assert invalid.log.count("\n") == 1


def test_every_setting_but_a_secret_has_a_flag_that_wins_over_its_variable(
    start_service: Any, slow_service: str
) -> None:
    service = start_service(
        slow_service,
        *("--failure", "configuration", "--load-seconds", "0", "--log-format", "json"),
        PYTHONPATH=".",
        LOAD_SECONDS="600",
        healthy=False,
    )
    assert service.process.wait(LIMIT_SECONDS) == 78
    assert json.loads(service.log.splitlines()[0])["event"] == "listening"
    for flags, code, says in [
        (["--load-seconds", "soon"], 78, "LOAD_SECONDS is 'soon'"),
        (["--load-second", "1"], 2, "unrecognized arguments: --load-second 1"),
        (["--jobgroup-token", "x"], 2, "unrecognized arguments: --jobgroup-token x"),
    ]:
        refused = start_service(slow_service, *flags, PYTHONPATH=".", healthy=False)
        assert refused.process.wait(LIMIT_SECONDS) == code
        assert says in refused.log


@pytest.mark.parametrize(
    ("module", "settings_class"),
    [("services.evaluation_head", HeadSettings), ("services.environment_server", EnvironmentSettings)],
)
def test_help_lists_the_settings_with_their_descriptions(module: str, settings_class: type[Settings]) -> None:
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS).stdout
    # Lines are also broken behind hyphens.
    words = "".join(shown.split())
    for name, field in settings_class.model_fields.items():
        is_secret = name in ("jobgroup_token", "skypilot_service_account_token")
        assert (f"--{name.replace('_', '-')}VALUE" in words) != is_secret
        assert ("".join(f"{field.description} [{name.upper()}]".split()) in words) != is_secret


def test_the_exit_code_does_not_depend_on_whether_the_reason_can_be_written() -> None:
    script = (
        "import sys\nfrom services.core import logs\n"
        "from services.core.errors import DependencyLostError, exit_code_of\n"
        "def main():\n    logs.configure('test')\n    logs.get_logger().info('x')\n    raise DependencyLostError('x')\n"
        "sys.exit(exit_code_of(main))"
    )
    # What coverage writes to stderr when it measures this process would change the exit code.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, stdout=full, stderr=full, env=environment, check=False)
    assert ended.returncode == 33


def test_a_taken_port_is_said_in_one_line(start_service: Any, slow_service: str) -> None:
    service = start_service(slow_service, PYTHONPATH=".")
    second = start_service(slow_service, PYTHONPATH=".", port=service.port, healthy=False)
    assert second.process.wait(LIMIT_SECONDS) == 78
    assert f"cannot listen on 127.0.0.1:{service.port}" in second.log


def test_a_lost_dependency_exits_with_33(start_service: Any, slow_service: str) -> None:
    service = start_service(slow_service, PYTHONPATH=".")
    httpx.get(f"{service.url}/lose", timeout=IDLE_SECONDS, trust_env=False)
    assert service.process.wait(LIMIT_SECONDS) == 33
    assert "error: the engine is gone" in service.log


@pytest.mark.parametrize("port", [-1, 70_000])
def test_an_impossible_port_is_named(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen("127.0.0.1", port)
