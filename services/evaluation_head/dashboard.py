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
from services.evaluation_head.head import Head
from services.run_page.routes import HEADERS

STATIC = Path(__file__).parent / "static"
SHARED = Path(run_page.__file__).parent / "static"
# The parts that the run page has too: there is one style, one chart and one way to write a number.
_SHARED_FILES = (
    "style.css",
    *("api.js", "chart.js", "colors.js", "dom.js", "download.js", "format.js", "paint.js", "picture.js", "series.js"),
)
FILES: dict[str, Path] = {
    **{name: SHARED / name for name in _SHARED_FILES},
    **{path.name: path for path in STATIC.iterdir() if path.suffix in (".js", ".css")},
}
PUBLIC = ("/", "/dashboard", *(f"/static/{name}" for name in FILES))
"""What a browser may load before it has been given the token: it contains no data."""

TOKEN_SECONDS = 10.0
SEND_SECONDS = 10.0
MAX_WATCHERS = 200
# Beyond 1013 of RFC 6455: what a refused client is told.
REFUSED, BUSY = 4401, 4429


def add_dashboard(app: FastAPI, head: Head) -> None:
    """Adds the page and ``/ws`` to an application made with ``public=PUBLIC``."""
    token = head.settings.token
    page = (STATIC / "dashboard.html").read_text()
    page = page.replace('data-asks-token="false"', f'data-asks-token="{str(token is not None).lower()}"')
    watchers: set[WebSocket] = set()

    @app.get("/", include_in_schema=False)
    async def get_root() -> Response:
        return RedirectResponse("dashboard")

    @app.get("/dashboard", tags=["dashboard"], response_class=Response)
    async def get_dashboard() -> Response:
        """The dashboard, a page for a browser."""
        return Response(page, media_type="text/html", headers=HEADERS)

    for name, path in FILES.items():
        _add_file(app, name, path)

    @app.websocket("/ws")
    async def watch(socket: WebSocket) -> None:
        await socket.accept()
        if not await _is_let_in(socket, token):
            await socket.close(REFUSED, 'send the token, {"token": JOBGROUP_TOKEN}, first')
            return
        if len(watchers) >= MAX_WATCHERS:
            await socket.close(BUSY, f"{MAX_WATCHERS} watch already")
            return
        watchers.add(socket)
        try:
            await _tell(socket, head, app.state.lifecycle.draining)
        except (WebSocketDisconnect, TimeoutError, RuntimeError):
            pass  # it left, or is too slow to be told
        finally:
            watchers.discard(socket)


def _add_file(app: FastAPI, name: str, path: Path) -> None:
    @app.get(f"/static/{name}", include_in_schema=False)
    async def get_file() -> Response:
        return FileResponse(path, headers=HEADERS)


async def _is_let_in(socket: WebSocket, token: str | None) -> bool:
    """Whether the client has the token: in its header, or, as browsers cannot, in its first message."""
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


async def _tell(socket: WebSocket, head: Head, draining: asyncio.Event) -> None:
    """Sends statistics as they come: the history first, then what is new."""
    told = 0.0
    leaving = asyncio.ensure_future(_left(socket))
    try:
        while not leaving.done() and not draining.is_set():
            points = head.history.since(told)
            told = points[-1]["time"] if points else told
            message: dict[str, Any] = {"stats": head.stats(), "history": points}
            async with asyncio.timeout(SEND_SECONDS):
                await socket.send_text(orjson.dumps(message).decode())
            news = asyncio.ensure_future(head.history.added.wait())
            await asyncio.wait({leaving, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        if not leaving.done():
            await socket.close(1001, "the head ends")
    finally:
        leaving.cancel()


async def _left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
