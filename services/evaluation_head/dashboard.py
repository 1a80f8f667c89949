"""The dashboard's page, and the WebSocket that keeps it up to date."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, RedirectResponse, Response

from services import run_page
from services.core.tasks import run_until_first_ends
from services.evaluation_head.head import Head
from services.run_page.routes import HEADERS

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


def add_dashboard(app: FastAPI, head: Head) -> None:
    """Add the page and ``/ws`` to an application made with ``public=PUBLIC``."""
    token = head.settings.token
    page = (STATIC / "dashboard.html").read_text()
    page = page.replace('data-asks-token="false"', f'data-asks-token="{str(token is not None).lower()}"')

    @app.get("/", include_in_schema=False)
    async def get_root() -> Response:
        return RedirectResponse("dashboard")

    @app.get("/dashboard", tags=["dashboard"], response_class=Response)
    async def get_dashboard() -> Response:
        """Return the dashboard, a page for a browser."""
        return Response(page, media_type="text/html", headers=HEADERS)

    for name, path in FILES.items():
        _add_file(app, name, path)

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


def _add_file(app: FastAPI, name: str, path: Path) -> None:
    @app.get(f"/static/{name}", include_in_schema=False)
    async def get_file() -> Response:
        return FileResponse(path, headers=HEADERS)


async def _has_token(socket: WebSocket, token: str | None) -> bool:
    """Return whether the client has the token, in its header or, as browsers cannot set one, in its first message."""
    if token is None:
        return True
    given = socket.headers.get("authorization", "")
    if not given:
        try:
            async with asyncio.timeout(TOKEN_SECONDS):
                first = orjson.loads(await socket.receive_text())
        except (TimeoutError, WebSocketDisconnect, orjson.JSONDecodeError, KeyError):
            return False
        given = f"Bearer {first.get('token')}" if isinstance(first, dict) else ""
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


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
