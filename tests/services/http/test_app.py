from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.testclient import TestClient
from pydantic import SecretStr
from structlog.testing import capture_logs

from services.core import endpoints, logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.settings import Settings
from services.core.tasks import in_background
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app, is_ours
from services.http.json_body import MAX_DEPTH, json_depth
from services.http.problems import PROBLEM_MEDIA_TYPE, ProblemError
from services.http.provenance import describe
from services.http.server import run_service
from services.protocol.base import ComponentRecord
from services.protocol.rewards import RewardItem, RewardResult
from services.reward_server.settings import JudgeSettings
from tests.ports import free_port
from tests.waiting import IDLE_SECONDS, wait_ready, wait_until

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


async def test_bodies_that_are_not_plain_json_are_refused(serving: Any) -> None:
    bodies = {
        "nan": b'{"prompt": "a", "response": "b", "ground_truth": NaN}',
        "infinite": b'{"prompt": "a", "response": "b", "ground_truth": "c", "completion_tokens": 1e999}',
        "surrogate": b'{"prompt": "\\ud800", "response": "b", "ground_truth": "c"}',
        "encoded surrogate": b'{"prompt": "\xed\xa0\x80", "response": "b", "ground_truth": "c"}',
        "not utf-8": b'{"prompt": "\xff", "response": "b", "ground_truth": "c"}',
        "deep": b'{"prompt": "a", "response": "b", "ground_truth": ' + b"[" * 100 + b"]" * 100 + b"}",
        "very deep": b"[" * 100_000,
        "unended": b'{"a": "' + b"\\" * 99_999,
        "empty": b"",
    }
    async with serving(make_app()) as client:
        for name, body in bodies.items():
            response = await client.post("/echo", content=body, headers=JSON)
            assert response.status_code in (400, 422), name
            is_problem(response, response.status_code)


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


HOSTS = {
    "127.0.0.1:8002": True,
    "10.1.2.3": True,
    "[::1]:80": True,
    "LOCALHOST:8002": True,
    "trainer.localhost": True,
    "reward-server": True,
    "reward-server-0.group-7:8002": True,
    "reward.default.svc.cluster.local": True,
    "reward.default.svc": True,
    "ip-10-0-0-1.ec2.internal": True,
    "node.example.com": True,
    "evil.example": False,
    "127.0.0.1.evil.example:8002": False,
    "reward-server-0.group-7.evil.example": False,
    "[::1].evil.example": True,  # No browser sends it.
}


@pytest.mark.parametrize("host", HOSTS)
async def test_without_a_token_no_name_of_another_site_leads_here(
    serving: Any, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "group-7")
    monkeypatch.setattr("socket.gethostname", lambda: "node.example.com")
    is_ours.cache_clear()
    async with serving(make_app()) as client:
        assert (await client.get("/stats", headers={"Host": host})).status_code == (200 if HOSTS[host] else 421)
        assert (await client.get("/health", headers={"Host": host})).status_code == 200
    async with serving(make_app(token="t")) as client:
        reply = await client.get("/stats", headers={"Host": host, "Authorization": "Bearer t"})
        assert reply.status_code == 200, "the token is enough"
    is_ours.cache_clear()


async def test_without_a_token_no_page_of_another_site_opens_a_websocket() -> None:
    app = make_app()

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    client = TestClient(app)
    for headers in ({}, {"Origin": "http://127.0.0.1:8080"}, {"Origin": "http://localhost"}):
        with client.websocket_connect("/ws", headers=headers):
            pass
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers=headers):
            pass


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
    args = {"api_key": "s3cret", "max_tokens": 5, "headers": {"Authorization": "Bearer s3cret", "X-Name": "n"}}
    told = describe(JudgeSettings(judge_args=args, judge_api_key_env="MY_KEY")).settings
    hidden = {"api_key": "*" * 10, "max_tokens": 5, "headers": {"Authorization": "*" * 10, "X-Name": "n"}}
    assert (told["judge_args"], told["judge_api_key_env"]) == (hidden, "MY_KEY")


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


class SlowSettings(Settings):
    load_seconds: float = 0
    failure: str = ""


class Service:
    """A service whose process is the test's own, and a client of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.log_levels: list[str | None] = []
        self.loading, self.may_load, self.asked = (threading.Event() for _ in range(3))
        self.may_load.set()
        self._monkeypatch, self._capfd = monkeypatch, capfd
        monkeypatch.setattr("services.http.server.DRAIN_SECONDS", int(IDLE_SECONDS))
        monkeypatch.setattr(logs, "configure", lambda *_: self.log_levels.append(os.environ.get("LOG_LEVEL")))
        monkeypatch.setattr(os, "environ", dict(os.environ))

    def run(self, *flags: str, then: Callable[[str], object] | None = None) -> tuple[int, str]:
        """Run the service, with ``then`` in a thread once it answers; return its exit code and what it has said."""
        port = free_port()
        flags = (*(() if "--port" in flags else ("--port", str(port))), "--host", "127.0.0.1", *flags)
        self._monkeypatch.setattr(sys, "argv", ["service", *flags])

        def visit() -> None:
            self.loading.wait(IDLE_SECONDS)
            then and then(f"http://127.0.0.1:{port}")

        visitor = threading.Thread(target=visit)
        visitor.start()
        try:
            code: Any = run_service(self._create_app, endpoints.Task.REWARD_SERVER, SlowSettings)
        except SystemExit as ended:
            code = ended.code
        self.loading.set()
        visitor.join(IDLE_SECONDS)
        return code, self._capfd.readouterr().err

    def _create_app(self, settings: SlowSettings) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            self.loading.set()
            await in_background(lambda: self.may_load.wait(settings.load_seconds or IDLE_SECONDS))
            if settings.failure:
                raise ConfigurationError("THING is 'x'; set it to y")
            yield

        app = create_service_app("slow", settings=settings, lifespan=lifespan)

        @app.get("/slow")
        async def slow() -> dict[str, bool]:
            self.asked.set()
            while not app.state.lifecycle.draining.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return {"done": True}

        @app.get("/lose")
        async def lose() -> dict[str, bool]:
            app.state.lifecycle.fail(DependencyLostError("the engine is gone"))
            return {}

        return app


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Service:
    return Service(monkeypatch, capfd)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=IDLE_SECONDS, trust_env=False)


def wait_healthy(url: str) -> None:
    wait_until(lambda: get(f"{url}/health").is_success, "health", every=0.01)


@pytest.mark.parametrize(("host", "token", "warnings"), [("0.0.0.0", "", 1), ("0.0.0.0", "t", 0), ("127.0.0.1", "", 0)])
def test_a_service_that_anybody_may_use_warns(service: Service, host: str, token: str, warnings: int) -> None:
    os.environ["JOBGROUP_TOKEN"] = token  # That of the fixture.
    with capture_logs() as events:
        assert service.run("--host", host, "--failure", "x")[0] == 78
    assert sum("JOBGROUP_TOKEN" in line["event"] for line in events if line["log_level"] == "warning") == warnings


def test_sigterm_lets_a_request_end_and_exits_with_0(service: Service) -> None:
    replies: list[Any] = []

    def visit(url: str) -> None:
        wait_healthy(url)
        request = threading.Thread(target=lambda: replies.append(get(f"{url}/slow").json()))
        request.start()
        assert service.asked.wait(IDLE_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        request.join(IDLE_SECONDS)

    assert service.run(then=visit) == (0, "")
    assert replies == [{"done": True}]


def test_sigterm_ends_a_service_that_is_still_loading(service: Service) -> None:
    service.may_load.clear()
    statuses: list[int] = []

    def visit(url: str) -> None:
        statuses.append(get(f"{url}/health").status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    assert service.run(then=visit) == (0, "")
    assert statuses == [503]
    service.may_load.set()


def test_a_lost_dependency_exits_with_33(service: Service) -> None:
    def visit(url: str) -> None:
        wait_healthy(url)
        get(f"{url}/lose")

    assert service.run(then=visit) == (33, "error: the engine is gone\n")


def test_what_cannot_work_exits_with_a_code_and_one_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting but a secret has a flag, which wins over the variable."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        for variables, flags, code, says in [
            ({"FAILURE": "configuration"}, [], 78, "THING is 'x'; set it to y"),
            ({"LOAD_SECONDS": "soon"}, [], 78, "LOAD_SECONDS is 'soon'"),
            ({"LOAD_SECONDS": "600"}, ["--load-seconds", "soon"], 78, "LOAD_SECONDS is 'soon'"),
            ({}, ["--port", str(taken)], 78, f"cannot listen on 127.0.0.1:{taken}"),
            ({}, ["--load-second", "1"], 2, "unrecognized arguments: --load-second 1"),
            ({}, ["--jobgroup-token", "x"], 2, "unrecognized arguments: --jobgroup-token x"),
        ]:
            monkeypatch.setattr(os, "environ", os.environ | variables)
            found, said = service.run(*flags)
            assert (found, says in said) == (code, True), said
            if code == 78:
                assert said.startswith("error: ")
                assert said.count("\n") == 1
            monkeypatch.setattr(os, "environ", {n: v for n, v in os.environ.items() if n not in variables})
    service.run("--failure", "configuration", "--log-level", "debug")
    assert service.log_levels[-1] == "debug"


@pytest.mark.parametrize("settings_class", [HeadSettings, EnvironmentSettings])
def test_help_lists_the_settings_with_their_descriptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], settings_class: type[Settings]
) -> None:
    monkeypatch.setattr(sys, "argv", ["service", "--help"])
    with pytest.raises(SystemExit):
        run_service(lambda _: FastAPI(), endpoints.Task.EVALUATION_HEAD, settings_class)
    # Lines are also broken behind hyphens.
    words = "".join(capsys.readouterr().out.split())
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


async def test_a_refusal_does_not_repeat_the_input(serving: Any) -> None:
    async with serving(make_app()) as client:
        response = await client.post("/echo", json={"prompt": {"password": "hunter2"}, "response": 1})
        assert "hunter2" not in response.text
