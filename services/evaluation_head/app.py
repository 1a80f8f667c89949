"""The evaluation head: how a request passes through it, its routes, its dashboard, and the dashboard's WebSocket."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import RedirectResponse, Response

from services.core.errors import ConfigurationError
from services.core.tasks import run_until_first_ends
from services.evaluation_head.discovery import Discovery
from services.evaluation_head.driver import Driver
from services.evaluation_head.policies import OverloadedError, Policy, keep_fresh, make_policy
from services.evaluation_head.registry import Moments, Registry
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app
from services.http.problems import ProblemError
from services.protocol.evaluation import DiscoveryReply, EvaluateReply, EvaluateRequest
from services.run_page import routes

SERVICE = "evaluation-head"
MAX_BODY_BYTES = 16 * 2**20
TICK_SECONDS = 1.0
HISTORY_SECONDS = 600

STATIC = Path(__file__).parent / "static"
# With the run page's files, so that both pages have one style, one chart and one way to write a number.
FILES = routes.FILES | {path.name: path for path in STATIC.iterdir() if path.suffix in (".js", ".css")}
PUBLIC = ("/", "/dashboard", *(f"/static/{name}" for name in FILES))
"""Paths that a browser may load before it has the token; they contain no data."""

TOKEN_SECONDS = 10.0
SEND_SECONDS = 10.0
REFUSED = 4401
"""Close code for clients without the token, from the range 4000 to 4999 that RFC 6455 leaves to applications."""


class Head:
    """The state behind the routes."""

    def __init__(self, settings: HeadSettings) -> None:
        self.settings = settings
        self.policies: dict[str, Policy] = {}
        self.registry = Registry()
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_SECONDS)
        """Points of the dashboard's plots, one a second for ten minutes, so that a page opened late shows them, too."""
        self.ticked = asyncio.Event()
        """Set when the next point is added, and then replaced by a new event."""
        self.driver = Driver(settings, self.policies, self.registry)
        self.discovery = Discovery(settings, self.driver.update)
        self._batched = (0, 0)

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """Load the policies; play and discover until the context ends.

        Raises:
            ConfigurationError: there is no policy, or a policy cannot be loaded.
        """
        settings = self.settings
        if not settings.policies:
            raise ConfigurationError("HEAD_POLICIES is empty: name a policy, as --policies llm=http://HOST:30000")
        async with AsyncExitStack() as stack:
            for name, target in settings.policies.items():
                self.policies[name] = await stack.enter_async_context(make_policy(name, target, settings))
            stack.push_async_callback(self.driver.close)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            tasks = [group.create_task(self.discovery.run()), group.create_task(self._tick())]
            tasks += [group.create_task(keep_fresh(policy)) for policy in self.policies.values()]
            yield
            for task in tasks:
                task.cancel()

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Return actions for a request's states, and record its episodes.

        Raises:
            ProblemError: there is no such policy, the server's name is taken, or the policy gives no actions.
        """
        started = time.monotonic()
        policy = next(iter(self.policies.values())) if request.policy is None else self.policies.get(request.policy)
        if policy is None:
            raise ProblemError(404, f"no policy {request.policy!r} here; there are {list(self.policies)}")
        server = self.registry.pushing(request)
        for report in request.finished:
            self.registry.finish(server, report, policy.name)
        states = request.all_states
        try:
            decisions = await policy.act(states, logprobs=request.logprobs) if states else []
        except OverloadedError:
            self.registry.overloaded += 1
            raise
        seconds = time.monotonic() - started
        self.registry.played(server, policy.name, request.episodes or (), len(states), seconds)
        actions = [decision.action for decision in decisions]
        return EvaluateReply.model_construct(
            policy=policy.name,
            policy_versions=[decision.version for decision in decisions],
            actions=actions,
            action=actions[0] if request.state is not None else None,
            logprobs=[decision.logprob for decision in decisions] if request.logprobs else None,
        )

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats and of the messages that /ws sends."""
        return {
            "time": time.time(),
            **self.registry.stats(),
            "policies": [
                {"name": name, "kind": policy.kind, "trouble": policy.trouble, **policy.stats()}
                for name, policy in self.policies.items()
            ],
            "discovery": self.discovery.reply().model_dump(),
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.registry.drop_idle()
            self.history.append(self._point())
            self.registry.newest_returns = Moments()
            self.ticked.set()
            self.ticked = asyncio.Event()

    def _point(self) -> dict[str, Any]:
        """Return the newest point of the dashboard's plots."""
        stats = self.stats()
        batching = [policy for policy in stats["policies"] if "batches" in policy]
        batched = (sum(policy["batches"] for policy in batching), sum(policy["states"] for policy in batching))
        batches, states = batched[0] - self._batched[0], batched[1] - self._batched[1]
        self._batched = batched
        return {
            "time": stats["time"],
            "requests_per_second": stats["requests_per_second"],
            "states_per_second": stats["states_per_second"],
            "latency_p50": stats["latency_ms"]["p50"],
            "latency_p95": stats["latency_ms"]["p95"],
            "batch_size": states / batches if batches else None,
            "active": stats["episodes"]["active"],
            "mean_return": self.registry.newest_returns.as_dict()["mean"],
        }


def create_app(settings: HeadSettings) -> FastAPI:
    """Return the evaluation head's application."""
    head = Head(settings)
    app = create_service_app(
        SERVICE,
        settings=settings,
        lifespan=head.running,
        stats=head.stats,
        description=__doc__ or "",
        public=PUBLIC,
        max_body_bytes=MAX_BODY_BYTES,
    )
    add_dashboard(app, head)

    @app.post("/evaluate")
    async def post_evaluate(request: EvaluateRequest) -> EvaluateReply:
        """Return actions for one state or many, in order; take reports of episodes that have ended."""
        return await head.evaluate(request)

    @app.get("/discovered")
    async def get_discovered() -> DiscoveryReply:
        """Return the environment servers of the last search."""
        return head.discovery.reply()

    @app.post("/discover")
    async def post_discover() -> DiscoveryReply:
        """Search for environment servers and return them."""
        await head.discovery.look()
        return head.discovery.reply()

    return app


def add_dashboard(app: FastAPI, head: Head) -> None:
    """Add the page and ``/ws`` to an application made with ``public=PUBLIC``."""
    token = head.settings.token
    page = (STATIC / "dashboard.html").read_text("utf-8")
    routes.add_page(app, "/dashboard", page, FILES, asks_token=token is not None)

    @app.get("/", include_in_schema=False)
    async def get_root() -> Response:
        return RedirectResponse("dashboard")

    @app.websocket("/ws")
    async def watch(socket: WebSocket) -> None:
        await socket.accept()
        if not await _has_token(socket, token):
            await socket.close(REFUSED, 'send the token, {"token": JOBGROUP_TOKEN}, first')
            return
        draining = app.state.lifecycle.draining
        try:
            await run_until_first_ends(_send(socket, head), _receive(socket), draining.wait())
            if draining.is_set():
                await socket.close(1001, "the head ends")
        except (WebSocketDisconnect, TimeoutError, RuntimeError):
            pass  # the client left, or reads too slowly


async def _has_token(socket: WebSocket, token: str | None) -> bool:
    """Return whether the client has the token, in its header or, as browsers cannot set one, in its first message."""
    if token is None:
        return True
    authorization = socket.headers.get("authorization", "")
    if not authorization:
        try:
            async with asyncio.timeout(TOKEN_SECONDS):
                first = orjson.loads(await socket.receive_text())
        except (TimeoutError, WebSocketDisconnect, orjson.JSONDecodeError, KeyError):
            return False
        authorization = f"Bearer {first.get('token')}" if isinstance(first, dict) else ""
    return hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())


async def _send(socket: WebSocket, head: Head) -> None:
    """Send statistics as they come: first with the whole history, then with new points only."""
    sent = 0.0
    while True:
        ticked = head.ticked
        points = [point for point in head.history if point["time"] > sent]
        sent = points[-1]["time"] if points else sent
        message: dict[str, Any] = {"stats": head.stats(), "history": points}
        async with asyncio.timeout(SEND_SECONDS):
            await socket.send_text(orjson.dumps(message).decode())
        await ticked.wait()


async def _receive(socket: WebSocket) -> None:
    """Return when the client disconnects."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
