"""The evaluation head's routes, its dashboard, and the WebSocket that keeps the dashboard up to date.

The states of POST /evaluate may be bytes: raw float32, or MessagePack with the fields of the JSON body. Both have the
states as float32 in little-endian byte order and row-major (C) order, and their shape as another field. The readers
return the request's other fields and the states, and refuse the same values as the JSON route.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from services import run_page
from services.core.tasks import run_until_first_ends
from services.evaluation_head.head import SERVICE, Head
from services.evaluation_head.policy import StatesRefusedError, check_finite
from services.evaluation_head.settings import HeadSettings
from services.http.app import create_service_app
from services.http.json_body import model_response
from services.http.problems import ProblemError
from services.protocol.evaluation import DiscoveryReply, EvaluateReply, EvaluateRequest
from services.run_page.routes import HEADERS

MAX_BODY_BYTES = 16 * 2**20


STATIC = Path(__file__).parent / "static"
SHARED = Path(run_page.__file__).parent / "static"
# The run page's files come first, so that both pages have one style, one chart and one way to write a number.
FILES = {p.name: p for folder in (SHARED, STATIC) for p in folder.iterdir() if p.suffix in (".js", ".css")}
PUBLIC = ("/", "/dashboard", *(f"/static/{name}" for name in FILES))
"""Paths that a browser may load before it has the token; they contain no data."""

TOKEN_SECONDS = 10.0
SEND_SECONDS = 10.0
REFUSED = 4401
"""Close code for clients without the token, from the range 4000 to 4999 that RFC 6455 leaves to applications."""
RAW = "application/octet-stream"
MSGPACK = "application/msgpack"
_SHAPE = re.compile(r"[0-9]{1,9}(,[0-9]{1,9}){0,8}")


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

    binary = APIRouter(route_class=BinaryRoute)

    @binary.post("/evaluate", include_in_schema=False)
    async def post_binary_evaluate(http: Request) -> Response:
        request, states = await read_request(http)
        return model_response(await head.evaluate(request, states))

    app.include_router(binary)

    @app.post("/evaluate")
    async def post_evaluate(request: EvaluateRequest) -> EvaluateReply:
        """Return actions for one state or many, in order; take reports of episodes that have ended.

        States may also be bytes: a body of raw float32 (application/octet-stream) with `shape` and the other fields in
        the query, or MessagePack (application/msgpack) of these fields with `states` as bytes and their `shape`.
        """
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
    page = page.replace('data-asks-token="false"', f'data-asks-token="{str(token is not None).lower()}"')

    @app.get("/", include_in_schema=False)
    async def get_root() -> Response:
        return RedirectResponse("dashboard")

    @app.get("/dashboard", tags=["dashboard"], response_class=Response)
    async def get_dashboard() -> Response:
        """Return the dashboard, a page for a browser."""
        return Response(page, media_type="text/html", headers=HEADERS)

    @app.get("/static/{name}", include_in_schema=False)
    async def get_file(name: str) -> Response:
        if name not in FILES:
            raise ProblemError(404, f"no file {name!r} here")
        return FileResponse(FILES[name], headers=HEADERS)

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
        added = head.history.added
        points = head.history.since(sent)
        sent = points[-1]["time"] if points else sent
        message: dict[str, Any] = {"stats": head.stats(), "history": points}
        async with asyncio.timeout(SEND_SECONDS):
            await socket.send_text(orjson.dumps(message).decode())
        await added.wait()


async def _receive(socket: WebSocket) -> None:
    """Return when the client disconnects."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


class BinaryRoute(APIRoute):
    """A route for requests whose body is raw float32 or MessagePack; others pass on to the next route of the path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route takes the request."""
        return super().matches(scope) if media_type(scope) in (RAW, MSGPACK) else (Match.NONE, {})


def media_type(scope: Scope) -> str:
    """Return the media type of a request's body without its parameters, "" where it has none."""
    header = Headers(scope=scope).get("content-type", "") if scope["type"] == "http" else ""
    return header.partition(";")[0].strip().lower()


async def read_request(http: Request) -> tuple[EvaluateRequest, NDArray[np.float32] | None]:
    """Read a request of a BinaryRoute; a raw body has its shape and the other fields in the query.

    Returns:
        The request, in which zeros stand for the states, and its states [count, *shape]; None: only reports.

    Raises:
        ProblemError: the body is not MessagePack (400); shape and bytes disagree, or a number is not finite (422).
        RequestValidationError: a field is not allowed.
    """
    body = await http.body()
    fields: dict[str, Any]
    if media_type(http.scope) == RAW:
        fields = {**http.query_params, "states": body}
        if _SHAPE.fullmatch(fields.get("shape", "")):
            fields["shape"] = [int(size) for size in fields["shape"].split(",")]
    else:
        try:
            fields = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProblemError(400, f"the body is not valid MessagePack: {error!r}") from error
        if not isinstance(fields, dict):
            raise ProblemError(422, "the body must be a map with the fields of the JSON body, and 'shape' for 'states'")
    if "state" in fields:
        raise StatesRefusedError("state is for JSON; send the bytes of one state as states, with a shape such as 1,4")
    states = None
    if fields.keys() & {"states", "shape"}:
        states = _array(fields.pop("states", None), fields.pop("shape", None))
        # So that the model checks their number, and the number of episodes.
        fields["states"] = [0.0] * len(states)
    try:
        return EvaluateRequest.model_validate(fields), states
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _array(content: object, shape: object) -> NDArray[np.float32]:
    """Return the array of some bytes.

    Raises:
        StatesRefusedError: they do not fit the shape, or a number is not finite.
    """
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise StatesRefusedError(
            f"shape is {repr(shape)[:60]}; needed are the number of states and the shape of one, as in ?shape=64,4 of "
            "a raw body or [64, 4] in MessagePack"
        )
    needed = 4 * math.prod(shape)
    if not isinstance(content, bytes) or len(content) != needed:
        actual = f"{len(content)} bytes" if isinstance(content, bytes) else type(content).__name__
        raise StatesRefusedError(f"states are {actual}; {shape} of float32 are {needed} bytes")
    states = np.frombuffer(content, "<f4").reshape(shape).astype(np.float32, copy=False)
    check_finite(states, "NaN or an infinity; needed are finite float32")
    return states
