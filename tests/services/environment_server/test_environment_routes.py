"""The environment server's routes: episodes over HTTP, with steps that repeat, do not fit, hang or fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from services.core.errors import ConfigurationError
from services.environment_server import app as app_module
from services.environment_server import episodes
from services.environment_server.settings import EnvironmentSettings
from tests.services.environment_server import odd_environments
from tests.services.environment_server.conftest import ODD
from tests.waiting import IDLE_SECONDS, LoopClock, eventually, stats_show


async def begin(client: Any, **request: Any) -> list[dict[str, Any]]:
    response = await client.post("/reset", json=request)
    assert response.status_code == 200, response.text
    return response.json()["episodes"]


async def take(client: Any, *steps: tuple[str, int, Any]) -> list[dict[str, Any]]:
    items = [{"episode": episode, "step": step, "action": action} for episode, step, action in steps]
    response = await client.post("/step", json={"steps": items})
    assert response.status_code == 200, response.text
    return response.json()["results"]


async def test_an_episode_over_http_is_the_one_that_gymnasium_plays(serving: Any, app: Any) -> None:
    environment = gymnasium.make("CartPole-v1")
    state, _ = environment.reset(seed=7)
    async with serving(app()) as client:
        episode = (await begin(client, seed=7))[0]
        assert episode["seed"] == 7
        assert np.allclose(episode["state"], state)
        total, steps, done = 0.0, 0, False
        while not done:
            action = steps % 2
            result = (await take(client, (episode["episode"], steps, action)))[0]
            state, reward, terminated, truncated, _ = environment.step(action)
            total, steps, done = total + reward, steps + 1, terminated or truncated
            assert np.array_equal(np.float32(result["state"]), state)
            assert (result["steps"], result["episode_return"]) == (steps, total)
            assert result["status"] == ("terminated" if terminated else "truncated" if truncated else "running")


async def test_many_episodes_are_begun_and_stepped_at_once(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        health = (await client.get("/health")).json()
        assert (health["name"], health["environment"], health["pushing"]) == ("test-server", "CartPole-v1", False)
        info = (await client.post("/reset", json={"seed": 7, "request_id": "r"})).json()
        action = info["environment"]["action"]
        assert (info["environment"]["id"], action["kind"], action["count"]) == ("CartPole-v1", "index", 2)
        await client.post("/close", json={"episodes": [info["episodes"][0]["episode"]]})
        begun = await begin(client, episodes=64, seed=100)
        assert [episode["seed"] for episode in begun] == list(range(100, 164))
        assert len({episode["episode"] for episode in begun}) == 64
        results = await take(client, *((e["episode"], 0, 1) for e in reversed(begun)))
        assert [r["episode"] for r in results] == [e["episode"] for e in reversed(begun)]
        assert (await client.get("/stats")).json()["active"] == 64
        closed = await client.post("/close", json={"episodes": [e["episode"] for e in begun[:10]] + ["who"]})
        assert closed.json() == {"closed": 10, "unknown": 1}
        assert (await client.get("/stats")).json()["active"] == 54


async def test_a_repeated_request_takes_no_second_step(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}Plain-v0")) as client:
        first = await begin(client, request_id="r", seed=1)
        assert await begin(client, request_id="r", seed=1) == first
        episode = first[0]["episode"]
        once = await take(client, (episode, 0, 0))
        assert await take(client, (episode, 0, 0)) == once
        assert (await take(client, (episode, 1, 0)))[0]["steps"] == 2
        assert (await client.get("/stats")).json()["episodes"]["steps"] == 2
        early = (await take(client, (episode, 9, 0)))[0]
        assert early["status"] == "refused"
        assert "stands at step 2" in early["detail"]


async def test_the_last_step_can_be_asked_for_again_after_the_episodes_end(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}Plain-v0", environment_max_steps=2)) as client:
        episode = (await begin(client))[0]["episode"]
        await take(client, (episode, 0, 0))
        last = await take(client, (episode, 1, 0))
        assert (last[0]["status"], last[0]["episode_return"]) == ("truncated", 2.0)
        assert await take(client, (episode, 1, 0)) == last
        assert (await take(client, (episode, 2, 0)))[0]["status"] == "refused"


async def test_an_action_that_does_not_fit_is_refused_and_leaves_the_episode(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        episode = (await begin(client, seed=1))[0]["episode"]
        for action in (2, -1, 0.5, True, "left", [1], [], None, 10**30, [[0], [1, 2]]):
            response = await client.post("/step", json={"steps": [{"episode": episode, "step": 0, "action": action}]})
            if response.status_code != 200:
                assert response.status_code == 422, action
            else:
                result = response.json()["results"][0]
                assert (result["status"], "takes Discrete(2)" in result["detail"]) == ("refused", True), action
        assert (await take(client, (episode, 0, 1)))[0]["steps"] == 1
        for body in (
            {},
            {"steps": []},
            {"steps": [{"episode": "a", "step": -1, "action": 0}]},
            {"steps": [{"episode": "a b", "step": 0, "action": 0}]},
            {"steps": [{"episode": "a", "step": 0, "action": 0}] * 2},
            {"steps": [{"episode": "a", "step": 0, "action": {"left": 1}}]},
        ):
            assert (await client.post("/step", json=body)).status_code == 422, body


async def test_numbers_beyond_the_bounds_are_clipped_and_wrong_shapes_refused(serving: Any, app: Any) -> None:
    async with serving(app(environment="Pendulum-v1")) as client:
        info = (await client.post("/reset", json={})).json()["environment"]
        assert info["state"] == {"kind": "numbers", "shape": [3]}
        assert (info["action"]["kind"], info["action"]["shape"]) == ("numbers", [1])
        within, beyond, wrong = await begin(client, episodes=3)
        assert (await take(client, (wrong["episode"], 0, [1.0, 2.0])))[0]["status"] == "refused"
        twins = [(await begin(client, seed=3))[0]["episode"] for _ in range(2)]
        results = await take(client, (twins[0], 0, [2.0]), (twins[1], 0, [1e9]))
        assert results[0]["state"] == results[1]["state"]
        assert within["seed"] + 1 == beyond["seed"]
        text = '{"steps": [{"episode": "a", "step": 0, "action": [NaN]}]}'
        response = await client.post("/step", content=text, headers={"Content-Type": "application/json"})
        assert response.status_code == 400


async def test_composed_states_are_flattened(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}Composed-v0")) as client:
        reply = (await client.post("/reset", json={})).json()
        assert reply["environment"]["state"]["shape"] == [5]
        assert reply["episodes"][0]["state"] == [0.0, 0.0, 1.0, 0.25, 0.5]
        result = (await take(client, (reply["episodes"][0]["episode"], 0, 1)))[0]
        assert (result["state"], result["reward"]) == ([0.0, 1.0, 0.0, 0.0, 0.0], 1.0)


async def test_an_environment_of_texts_is_a_conversation(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}Parrot-v0")) as client:
        reply = (await client.post("/reset", json={"seed": 7})).json()
        assert reply["environment"]["state"] == {"kind": "messages", "shape": []}
        assert (reply["environment"]["action"]["kind"], reply["environment"]["deterministic"]) == ("text", True)
        [start] = reply["episodes"]
        first = {"role": "user", "content": "Seed 7. Say something."}
        assert start["state"] == [first]
        episode = start["episode"]
        for refused in ("Hi there", 5, ["a"]):
            [result] = await take(client, (episode, 0, refused))
            assert (result["status"], "Text(1, 5" in result["detail"]) == ("refused", True)
        [result] = await take(client, (episode, 0, "hello"))
        said = [first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "hello!"}]
        assert (result["status"], result["state"]) == ("running", said)
        [result] = await take(client, (episode, 1, "bye"))
        assert (result["status"], result["reward"], len(result["state"])) == ("terminated", 1.0, 5)


async def test_a_step_asked_for_again_while_it_is_taken_is_taken_once(serving: Any, app: Any) -> None:
    odd_environments.RELEASE.clear()
    odd_environments.HANGING.clear()
    async with serving(app(environment=f"{ODD}Sleepy-v0")) as client:
        episode = (await begin(client))[0]["episode"]
        both = [asyncio.create_task(take(client, (episode, 0, 1))) for _ in range(2)]
        await eventually(odd_environments.HANGING.is_set)
        closing = asyncio.create_task(client.post("/close", json={"episodes": [episode]}))
        await asyncio.sleep(0.1)
        assert not closing.done()
        odd_environments.RELEASE.set()
        first, second = await asyncio.gather(*both)
        assert first == second
        assert (await closing).json()["closed"] == 1
        counts = (await client.get("/stats")).json()["episodes"]
        assert (counts["steps"], counts["closed"]) == (1, 1)


async def test_a_broken_environment_loses_its_own_episode_only(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}Broken-v0")) as client:
        for action, says in ((1, "a gear fell off"), (2, "not finite"), (3, "reward nan")):
            first, broken, last = [e["episode"] for e in await begin(client, episodes=3)]
            results = await take(client, (first, 0, 0), (broken, 0, action), (last, 0, 0))
            assert [r["status"] for r in results] == ["running", "lost", "running"]
            assert says in results[1]["detail"]
            assert (await take(client, (broken, 0, 0)))[0]["status"] == "lost"
            stats = (await client.get("/stats")).json()
            assert (stats["active"], stats["episodes"]["lost"]) == (2 * action, action)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "Misshapen",
            [np.zeros(2), [0, 1], (0.5, 0.5), np.array([True, False])],
            [0.0, np.zeros(3), np.zeros((1, 2)), [[0.0], [1.0, 2.0]], ["a", "b"], [None, 1.0], {"a": 1, "b": 2}],
        ),
        ("WholeNumbers", [[0, 1], np.ones(2, np.int64)], [[0.5, 1.0], np.zeros(2), [1]]),
        ("Wordless", ["Hello."], [5, b"Hello.", None, ["Hello."]]),
    ],
)
async def test_an_observation_of_another_form_than_declared_loses_the_episode(
    serving: Any, app: Any, name: str, good: list[Any], bad: list[Any]
) -> None:
    action = "go" if name == "Wordless" else 0
    async with serving(app(environment=f"{ODD}{name}-v0")) as client:

        async def begun(first: Any) -> int:
            odd_environments.Misshapen.given = first
            return (await client.post("/reset", json={})).status_code

        for observation in good:
            assert await begun((observation, {})) == 200, observation
        # As an environment of gym before 0.26 begins: without a dictionary.
        firsts = [good[0], (good[0], None), (good[0],), *((observation, {}) for observation in bad)]
        assert {repr(first): await begun(first) for first in firsts} == dict.fromkeys(map(repr, firsts), 422)
        odd_environments.Misshapen.given = (good[0], {})
        for observation, begin_ in zip(bad, await begin(client, episodes=len(bad)), strict=True):
            odd_environments.Misshapen.given = observation
            [result] = await take(client, (begin_["episode"], 0, action))
            assert (result["status"], result["detail"] != "") == ("lost", True), observation


HOLDING = ODD.removesuffix("Odd/") + "Holding"


async def test_an_outcome_that_makes_no_result_loses_the_episode(serving: Any, app: Any) -> None:
    async with serving(app(environment=HOLDING)) as client:
        episode = (await begin(client, seed=2))[0]["episode"]
        assert (await take(client, (episode, 0, "0.5")))[0]["figures"] == {"odd": 0.5}
        for _ in range(2):
            [lost] = await take(client, (episode, 1, "nan"))
            assert (lost["status"], lost["steps"]) == ("lost", 1)
            assert "figures.odd" in lost["detail"]
        assert (await client.get("/stats")).json()["episodes"]["steps"] == 1


async def test_environments_that_fail_to_begin_or_to_answer_in_time_are_closed(serving: Any, app: Any) -> None:
    held = odd_environments.Holding.held

    def are_closed() -> bool:
        return odd_environments.Holding.held == held

    async with serving(app(environment=HOLDING, environment_step_seconds=5)) as client:
        for seed, said in ((0, "no world today"), (2, "gave None")):
            failed = await client.post("/reset", json={"seed": seed, "episodes": 2, "request_id": str(seed)})
            assert (failed.status_code, said in failed.json()["detail"]) == (422, True), failed.text
            assert (await client.get("/stats")).json()["active"] == 0
            await eventually(are_closed, "environments are closed", idle_seconds=20)
        episode = (await begin(client, seed=2))[0]["episode"]
        assert not are_closed()
        [lost] = await take(client, (episode, 0, "wait"))
        assert (lost["status"], "ENVIRONMENT_STEP_SECONDS" in lost["detail"]) == ("lost", True)
        await eventually(are_closed, "environments are closed", idle_seconds=20)
        assert (await client.get("/stats")).json()["stuck"] == 0


async def test_a_hanging_step_loses_its_episode_only(serving: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_environments.RELEASE.clear()
    odd_environments.HANGING.clear()
    clock = LoopClock(monkeypatch, asyncio.get_running_loop())
    async with serving(app(environment=f"{ODD}Sleepy-v0", environment_step_seconds=IDLE_SECONDS)) as client:
        hangs, goes_on = [e["episode"] for e in await begin(client, episodes=2)]
        taking = asyncio.create_task(take(client, (hangs, 0, 1), (goes_on, 0, 0)))
        await eventually(odd_environments.HANGING.is_set)
        clock.pass_by(IDLE_SECONDS)
        results = await taking
        assert [r["status"] for r in results] == ["lost", "running"]
        assert "ENVIRONMENT_STEP_SECONDS" in results[0]["detail"]
        assert (await client.get("/stats")).json()["stuck"] == 1
        odd_environments.RELEASE.set()
        await stats_show(client, lambda stats: stats["stuck"] == 0)


async def test_a_server_whose_environment_is_unavailable_does_not_start(serving: Any, app: Any) -> None:
    for name, says in (
        ("NoSuchGame-v0", "NoSuchGame"),
        ("no_such_module:Game-v0", "no_such_module"),
        (f"{ODD}Unshaped-v0", "observations"),
        (f"{ODD}Several-v0", "neither an index nor numbers"),
        (f"{ODD}Mute-v0", "or is a Conversation"),
    ):
        with pytest.raises(ConfigurationError, match=f"ENVIRONMENT is '{name}'.*{says}"):
            async with serving(app(environment=name)):
                pass


async def test_a_full_server_refuses_with_retry_after(serving: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MAX_EPISODES", 4)
    async with serving(app()) as client:
        await begin(client, episodes=3)
        full = await client.post("/reset", json={"episodes": 2})
        assert full.status_code == 429
        assert int(full.headers["Retry-After"]) >= 1
        assert "1 of 4" in full.json()["detail"]
        await begin(client, episodes=1)


async def test_episodes_that_are_not_stepped_are_dropped(
    serving: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "IDLE_SECONDS", 0.05)
    async with serving(app()) as client:
        episode = (await begin(client))[0]["episode"]
        await stats_show(client, lambda stats: stats["active"] == 0)
        result = (await take(client, (episode, 0, 1)))[0]
        assert result["status"] == "lost"
        assert "reset a new one" in result["detail"]


MIX = """
- {name: numbers, dataset: seeds, rollout: environment, environment: guessing}
- {name: poles, dataset: seeds, environment: CartPole-v1}
- {name: game, dataset: seeds, rollout: environment, environment: nim}
- {name: sums, dataset: arithmetic, rollout: completion, environment: nowhere}
"""


@pytest.fixture
def mixed(tmp_path: Path, app: Any) -> Any:
    def make(text: str = MIX, **options: Any) -> Any:
        (tmp_path / "mix.yaml").write_text(text)
        return app(sources=tmp_path / "mix.yaml", **options)

    return make


async def test_each_source_has_episodes_of_its_own_environment(serving: Any, mixed: Any) -> None:
    async with serving(mixed()) as client:
        begun = {}
        for source in ("numbers", "poles", "game", ""):
            reply = (await client.post("/reset", json={"seed": 3, "source": source})).json()
            begun[source] = reply["episodes"][0]["episode"]
            assert reply["environment"]["id"] == {"numbers": "guessing", "poles": "CartPole-v1"}.get(source, "nim")
            assert reply["environment"].get("seats", 1) == (2 if source in ("game", "") else 1)
        steps = [
            {"episode": begun["numbers"], "step": 0, "action": "50"},
            {"episode": begun["poles"], "step": 0, "action": 1},
            {"episode": begun["game"], "step": 0, "action": "1"},
        ]
        results = (await client.post("/step", json={"steps": steps})).json()["results"]
        assert [result["steps"] for result in results] == [1, 1, 1]
        assert [len(result.get("rewards") or []) for result in results] == [0, 0, 2]
        refusal = await client.post("/reset", json={"source": "sums"})
        assert (refusal.status_code, "there are game, numbers, poles" in refusal.json()["detail"]) == (422, True)


async def test_an_environment_that_cannot_be_made_is_refused_with_its_source(serving: Any, mixed: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"environment of poles in SOURCES is 'CartPoles-v1', which cannot be"):
        async with serving(mixed(MIX.replace("CartPole", "CartPoles"))):
            pass


async def test_a_server_of_several_environments_plays_none_for_a_head(serving: Any, mixed: Any) -> None:
    with pytest.raises(ConfigurationError, match="EVAL_HEAD_ENDPOINT has this server play one environment of one seat"):
        async with serving(mixed(eval_head_endpoint="http://127.0.0.1:9")):
            pass


def test_a_source_without_a_rollout_plays_the_environment_that_is_set(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text("- {name: a, dataset: seeds}\n- {name: b, dataset: seeds, rollout: agent}\n")
    settings = EnvironmentSettings(sources=tmp_path / "mix.yaml", environment="nim")
    assert settings.environments == {"a": "nim"}
    assert EnvironmentSettings(sources=tmp_path / "mix.yaml").environments == {"": "CartPole-v1"}
