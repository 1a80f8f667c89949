"""Tools at a session's URL: programs in a box of the session, run once, with results that outlive the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.gateway import tools
from services.http.server import serving as serving_at
from tests.ports import free_port
from tests.services.gateway.conftest import StartGateway
from tests.waiting import wait_ready

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")
APPEND = "echo x >> log; wc -l < log"


def call(name: str, number: int = 0, **arguments: str) -> dict[str, Any]:
    return {
        "id": f"call-{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``boxes(environment)``: an environment-server that the gateway finds; yields its application."""
    rows = tmp_path / "rows.jsonl"
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    rows.write_text("".join(json.dumps({"question": f"Print {n}.", "tests": tests}) + "\n" for n in range(2)))
    monkeypatch.setenv("DATASET", str(rows))
    monkeypatch.setenv("GROUND_TRUTH_COLUMN", "tests")

    @asynccontextmanager
    async def start(environment: str = "sandbox", **settings: Any) -> AsyncIterator[Any]:
        app = create_app(EnvironmentSettings(environment=environment, environment_step_seconds=90.0, **settings))
        async with app.router.lifespan_context(app):
            await wait_ready(app)
            async with serving_at(app) as url:
                app.state.address = url.removeprefix("http://")
                yield app

    return start


def find(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the gateway find the environment-server, beside the engine that it has."""
    engines = json.loads(os.environ[ENDPOINTS_VARIABLE])
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(engines | {"environment-server-0:8081": address}))


async def test_an_agent_calls_the_tools_that_the_model_names(
    gateway: StartGateway, boxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = {"name": "python", "arguments": {"code": "open('a', 'w').write('7'); print(6 * 7)"}}
    written = f"<tool_call>\n{json.dumps(asks)}\n</tool_call>"
    async with boxes() as app, gateway(answers=[written, "42"]) as running:
        find(monkeypatch, app.state.address)
        path = await running.open()
        base = path.removesuffix("/chat/completions")
        offered = (await running.client.get(f"{base}/tools")).json()
        assert [tool["function"]["name"] for tool in offered] == ["python", "bash"]
        client = AsyncOpenAI(base_url=f"http://service{base}", api_key="s", http_client=running.client)
        messages: list[Any] = [{"role": "user", "content": "What is 6 times 7?"}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=offered)
        [called] = reply.choices[0].message.tool_calls or ()
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        answered = (await running.client.post(f"{base}/tools", json=called.model_dump())).json()
        assert answered == {"role": "tool", "tool_call_id": called.id, "content": "42\n"}
        messages.append(answered)
        final = await client.chat.completions.create(model="m", messages=messages, tools=offered)
        assert final.choices[0].message.content == "42"
        # Another tool, another call: the same box; another session: another one.
        kept = await running.client.post(f"{base}/tools", json=call("bash", command="cat a"))
        assert kept.json()["content"] == "7"
        other = (await running.open("other")).removesuffix("/chat/completions")
        missing = await running.client.post(f"{other}/tools", json=call("bash", command="cat a"))
        assert missing.json()["content"].endswith("[exit code 1]")
        wrong = await running.client.post(f"{base}/tools", json=call("rm", 1))
        assert wrong.json()["content"].startswith("[the call cannot be read; the tools are python with")
        assert (await running.client.post(f"{base}/tools", json={"id": "x"})).status_code == 400
        trace = await running.finish()
        assert [sequence["messages"][-2]["content"] for sequence in trace["sequences"]] == ["42\n"]
        assert (await running.client.post(f"{base}/tools", json=call("bash", 2))).status_code == 409


async def test_a_call_runs_once_whatever_is_repeated_or_restarted(
    gateway: StartGateway, boxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with boxes() as app:
        async with gateway(answers=["no"]) as running:
            find(monkeypatch, app.state.address)
            base = (await running.open()).removesuffix("/chat/completions")
            first = call("bash", command=APPEND)
            replies = await asyncio.gather(*(running.client.post(f"{base}/tools", json=first) for _ in range(3)))
            assert [reply.json()["content"] for reply in replies] == ["1\n"] * 3
            slow = call("bash", 1, command=f": > begun; sleep 3; {APPEND}")
            interrupted = asyncio.create_task(running.client.post(f"{base}/tools", json=slow))
            await asyncio.sleep(1.0)
        await asyncio.gather(interrupted, return_exceptions=True)
        async with gateway(answers=["no"]) as running:
            find(monkeypatch, app.state.address)
            # The call that was under way is settled first, then the new one runs.
            third = await running.client.post(f"{base}/tools", json=call("bash", 2, command=APPEND))
            assert third.json()["content"] == "3\n"
            again = [await running.client.post(f"{base}/tools", json=one) for one in (first, slow)]
            assert [reply.json()["content"] for reply in again] == ["1\n", "2\n"]


async def test_a_server_that_is_not_there_or_has_no_boxes_is_an_error_that_says_so(
    gateway: StartGateway, boxes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "BEGIN_SECONDS", 1.0)
    async with boxes("guessing") as app:
        for session, address, status, says in (
            ("away", f"127.0.0.1:{free_port()}", 503, "environment-server"),
            ("other", app.state.address, 400, "set ENVIRONMENT=sandbox"),
        ):
            async with gateway(answers=["no"]) as running:
                find(monkeypatch, address)
                base = (await running.open(session)).removesuffix("/chat/completions")
                refused = await running.client.post(f"{base}/tools", json=call("bash", command="ls"))
                assert (refused.status_code, says in refused.json()["detail"]) == (status, True)


@pytest.mark.parametrize("is_repeatable", [False, True])
async def test_a_lost_box_is_an_error_unless_its_calls_are_repeatable(
    gateway: StartGateway, boxes: Any, monkeypatch: pytest.MonkeyPatch, is_repeatable: bool
) -> None:
    async with boxes(sandbox_repeatable=is_repeatable) as app, gateway(answers=["no"]) as running:
        find(monkeypatch, app.state.address)
        base = (await running.open()).removesuffix("/chat/completions")
        first = await running.client.post(f"{base}/tools", json=call("bash", command=APPEND))
        assert first.json()["content"] == "1\n"
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "zygote" in " ".join(child.cmdline()):
                    child.kill()
        second = await running.client.post(f"{base}/tools", json=call("bash", 1, command=APPEND))
        if is_repeatable:
            # In a new box, where the first call ran again.
            assert second.json()["content"] == "2\n"
        else:
            assert (second.status_code, "is lost: the box was lost" in second.json()["detail"]) == (500, True)
            again = await running.client.post(f"{base}/tools", json=call("bash", command=APPEND))
            assert again.json()["content"] == "1\n"
