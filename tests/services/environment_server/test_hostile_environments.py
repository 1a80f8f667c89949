"""Environments that would end, block or break their server: each costs its own episode, and the server goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.environment_server import app as app_module
from services.environment_server import episodes
from tests.services.environment_server.conftest import ODD
from tests.services.environment_server.odd_environments import HANGING, RELEASE, Exiting, Loops
from tests.services.environment_server.test_environment_routes import begin, take
from tests.waiting import IDLE_SECONDS, eventually, stats_show

MODULE = ODD.removesuffix("Odd/")
HOSTILE = f"{MODULE}Hostile"
KINDS = {1: "SystemExit: enough (", 2: "KeyboardInterrupt (", 3: "Cancelled"}


@pytest.fixture(autouse=True)
def released() -> Any:
    RELEASE.clear()
    HANGING.clear()
    yield
    RELEASE.set()


async def ids(client: Any, count: int, **request: Any) -> list[str]:
    return [start["episode"] for start in await begin(client, episodes=count, seed=100, **request)]


async def test_what_would_end_its_server_costs_its_episode_only(serving: Any, app: Any) -> None:
    words = dict(zip(("exit", "interrupt", "cancel"), KINDS.values(), strict=True))
    coroutine = {f"{where} {what}": says for where in ("step", "task") for what, says in words.items()}
    for environment, harmless, actions in ((HOSTILE, "a", coroutine), (f"{ODD}HostileFunctions-v0", 0, KINDS)):
        async with serving(app(environment=environment)) as client:
            for action, says in actions.items():
                first, hostile, last = await ids(client, 3)
                steps = [(first, 0, harmless), (hostile, 0, action), (last, 0, harmless)]
                results = await take(client, *steps)
                assert [result["status"] for result in results] == ["running", "lost", "running"]
                assert says in results[1]["detail"]
                assert results[1]["environment_failed"]
                on = await take(client, (first, 1, harmless), (last, 1, harmless))
                assert [result["steps"] for result in on] == [2, 2]
            for seed, says in KINDS.items():
                request = {"request_id": f"r{seed}"}
                refused = await client.post("/reset", json={"seed": seed, **request})
                assert (refused.status_code, says in refused.json()["detail"]) == (422, True)
                assert (await client.post("/reset", json={"seed": 7, **request})).status_code == 200


async def test_an_environment_that_would_end_its_server_where_it_closes_does_not(serving: Any, app: Any) -> None:
    Exiting.closed.clear()
    async with serving(app(environment=f"{ODD}Exiting-v0")) as client:
        [episode] = await ids(client, 1)
        await client.post("/close", json={"episodes": [episode]})
        await eventually(Exiting.closed.is_set, "the environment is closed")
        assert len(await begin(client)) == 1


async def test_an_environment_that_would_end_its_server_where_it_is_made_is_refused(serving: Any, app: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be made: SystemExit: not this way"):
        async with serving(app(environment=f"{MODULE}Unmakeable")):
            pass


async def test_a_coroutine_that_blocks_costs_its_episode_only(serving: Any, app: Any) -> None:
    async with serving(app(environment=HOSTILE, environment_step_seconds=4)) as client:
        waits, blocks, follows, later = await ids(client, 4)
        taking = asyncio.create_task(take(client, (waits, 0, "wait 0.1"), (blocks, 0, "task block"), (follows, 0, "a")))
        await eventually(HANGING.is_set, "the step blocks")
        assert (await client.get("/health")).status_code == 200
        later_step = asyncio.create_task(take(client, (later, 0, "b")))
        # The step that waits goes on when its event loop does, so it is lost at last; its environment did not fail.
        async with asyncio.timeout(IDLE_SECONDS):
            [after] = await later_step
            results = await taking
        assert [result["status"] for result in [*results, after]] == ["lost", "lost", "running", "running"]
        assert "ENVIRONMENT_STEP_SECONDS" in results[1]["detail"]
        assert "another episode blocked" in results[0]["detail"]
        assert [result.get("environment_failed", False) for result in results[:2]] == [False, True]
        assert (await client.get("/stats")).json()["stuck"] == 1
        assert [r["steps"] for r in await take(client, (follows, 1, "a"), (later, 1, "b"))] == [2, 2]
        RELEASE.set()
        await stats_show(client, lambda stats: stats["stuck"] == 0)
        assert (await take(client, (later, 2, "c")))[0]["steps"] == 3


async def test_steps_that_wait_outlive_a_coroutine_that_blocks_for_a_while(serving: Any, app: Any) -> None:
    async with serving(app(environment=HOSTILE, environment_step_seconds=20)) as client:
        waits, blocks = await ids(client, 2)
        taking = asyncio.create_task(take(client, (waits, 0, "wait 0.1"), (blocks, 0, "step block")))
        await eventually(HANGING.is_set, "the step blocks")
        await asyncio.sleep(1)
        RELEASE.set()
        assert [result["status"] for result in await taking] == ["running", "running"]
        assert (await client.get("/stats")).json()["stuck"] == 0


async def test_a_coroutine_that_cannot_be_cancelled_costs_its_episode_only(serving: Any, app: Any) -> None:
    async with serving(app(environment=HOSTILE, environment_step_seconds=3)) as client:
        deaf, late, good = await ids(client, 3)
        results = await take(client, (deaf, 0, "deaf 30"), (late, 0, "wait 30"), (good, 0, "a"))
        assert [result["status"] for result in results] == ["lost", "lost", "running"]
        assert all("ENVIRONMENT_STEP_SECONDS" in result["detail"] for result in results[:2])
        assert (await client.get("/stats")).json()["stuck"] == 1
        RELEASE.set()
        await stats_show(client, lambda stats: stats["stuck"] == 0)


async def test_too_many_coroutines_that_block_make_the_server_unhealthy(
    serving: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (app_module, episodes):
        monkeypatch.setattr(module, "MAX_STUCK", 1)
    async with serving(app(environment=HOSTILE, environment_step_seconds=3)) as client:
        first, second = await ids(client, 2)
        await take(client, (first, 0, "step block"))
        assert (await client.get("/health")).status_code == 200
        await take(client, (second, 0, "step block"))
        assert (await client.get("/health")).status_code == 503
        assert "2 environments hang" in (await client.post("/reset", json={})).json()["detail"]
        RELEASE.set()
        await stats_show(client, lambda stats: stats["stuck"] == 0)
        assert (await client.get("/health")).status_code == 200


async def test_all_coroutines_share_an_event_loop_and_one_that_closes_is_awaited_there(serving: Any, app: Any) -> None:
    Loops.closed_on.clear()
    async with serving(app(environment=f"{MODULE}Loops")) as client:
        first, second = await ids(client, 2)
        results = [(await take(client, (episode, 0, "on")))[0] for episode in (first, second)]
        assert [result["state"][0]["content"] for result in results] == ["True", "True"]
        await take(client, (first, 1, "end"))
        await eventually(lambda: True in Loops.closed_on, "the episode's environment is closed")
        assert (await take(client, (second, 1, "on")))[0]["state"][0]["content"] == "True"


async def test_a_step_that_cannot_be_written_loses_its_episode_only(serving: Any, app: Any) -> None:
    async with serving(app(environment=HOSTILE)) as client:
        for action in ("surrogate", "object", "error"):
            first, hostile, last = await ids(client, 3)
            steps = [(first, 0, "a"), (hostile, 0, action), (last, 0, "b")]
            for _ in range(2):  # The second request repeats the steps.
                results = await take(client, *steps)
                assert [result["status"] for result in results] == ["running", "lost", "running"]
                assert "caf\\udce9" in results[1]["detail"] or "invalid step result" in results[1]["detail"]
            assert [r["steps"] for r in await take(client, (first, 1, "a"), (last, 1, "b"))] == [2, 2]
        [episode] = await ids(client, 1)
        [refused] = await take(client, (episode, 0, "refuse"))
        assert (refused["status"], refused["detail"]) == ("refused", "caf\\udce9")


async def test_a_first_state_that_cannot_be_written_begins_no_episode(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{MODULE}Unwritable")) as client:
        for _ in range(2):
            refused = await client.post("/reset", json={"request_id": "r"})
            assert (refused.status_code, "as its first state" in refused.json()["detail"]) == (422, True)
