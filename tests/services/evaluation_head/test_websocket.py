"""The WebSocket /ws: live statistics, the token, and watchers that do not read."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
import websockets
from pydantic import SecretStr

from services.evaluation_head import app
from tests.services.run_page.serving import served_ready
from tests.waiting import IDLE_SECONDS


async def test_the_websocket_sends_statistics_every_second(head: Any) -> None:
    with served_ready(head()) as url:
        async with websockets.connect(url.replace("http", "ws") + "/ws") as socket:
            messages = [orjson.loads(await socket.recv()) for _ in range(3)]
    assert [message["stats"]["policies"][0]["name"] for message in messages] == ["times"] * 3
    assert messages[0]["stats"]["time"] < messages[2]["stats"]["time"]
    moments = [point["time"] for message in messages for point in message["history"]]
    assert moments == sorted(set(moments))


async def test_the_websocket_wants_the_token(head: Any) -> None:
    with served_ready(head(jobgroup_token=SecretStr("secret"))) as url:
        address = url.replace("http", "ws") + "/ws"
        for first in ('{"token": "wrong"}', "[]", "not json"):
            async with websockets.connect(address) as socket:
                await socket.send(first)
                with pytest.raises(websockets.ConnectionClosed) as refused:
                    await socket.recv()
                assert refused.value.rcvd.code == app.REFUSED
        async with websockets.connect(address, additional_headers={"Authorization": "Bearer secret"}) as socket:
            assert "stats" in orjson.loads(await socket.recv())
        assert httpx.get(f"{url}/stats", timeout=IDLE_SECONDS, trust_env=False).status_code == 401  # noqa: ASYNC210
        assert httpx.get(f"{url}/dashboard", timeout=IDLE_SECONDS, trust_env=False).status_code == 200  # noqa: ASYNC210


async def test_a_watcher_that_does_not_read_delays_no_other(head: Any) -> None:
    with served_ready(head()) as url:
        deaf = [await websockets.connect(url.replace("http", "ws") + "/ws", max_queue=1) for _ in range(10)]
        async with websockets.connect(url.replace("http", "ws") + "/ws") as socket:
            for _ in range(3):
                await socket.recv()
        for one in deaf:
            one.transport.abort()  # closing would wait for messages that nobody reads
