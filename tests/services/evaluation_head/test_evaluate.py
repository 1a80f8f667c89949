"""POST /evaluate: the order of actions, refused input, counts of servers and episodes, overload, new versions."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.core.errors import ConfigurationError
from services.evaluation_head import registry, torch_policy
from services.evaluation_head.app import MAX_BODY_BYTES
from tests.services.evaluation_head import policies
from tests.waiting import IDLE_SECONDS, Deadline, stats_show

KEY, OTHER_KEY = "k" * 16, "o" * 16


async def ask(client: Any, status: int = 200, **request: Any) -> Any:
    response = await client.post("/evaluate", json=request)
    assert response.status_code == status, response.text
    return response.json()


async def test_states_are_answered_in_order_and_requests_share_a_batch(serving: Any, head: Any) -> None:
    async with serving(head(head_batch_size=8)) as client:
        reply = await ask(client, state=[1, -2.5])
        assert reply == {"policy": "times", "policy_versions": [3], "actions": [[3.0, -7.5]], "action": [3.0, -7.5]}
        reply = await ask(client, states=[[i, 0] for i in range(30)])
        assert [action[0] for action in reply["actions"]] == [3.0 * i for i in range(30)]
        assert reply["action"] is None
        policy = (await client.get("/stats")).json()["policies"][0]
        assert policy["batch_sizes"] == {"1": 1, "6": 1, "8": 3}
    async with serving(head(head_batch_size=20, head_timeout_ms=10_000)) as client:
        replies = await asyncio.gather(*(ask(client, state=[i, 1]) for i in range(20)))
        assert [reply["action"][0] for reply in replies] == [3.0 * i for i in range(20)]
        assert (await client.get("/stats")).json()["policies"][0]["batch_sizes"] == {"20": 1}


async def test_an_index_is_counted_from_where_the_actions_start(serving: Any, head: Any, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    torch_policy.save_policy(module, tmp_path / "p.pt2", policies.PAIR, policies.THREE)
    async with serving(head(head_policies=f"three={tmp_path / 'p.pt2'}")) as client:
        reply = await ask(client, states=[[1, 0], [0, 1], [-1, -1]])
        assert (reply["actions"], reply["policy_versions"]) == ([10, 11, 12], [None] * 3)


WRONG: list[tuple[list[Any], str]] = [
    ([[1, 2, 3]], "state 0 does not fit: policy 'times' takes numbers of shape [2]"),
    ([[1, 2], [1]], "state 1 does not fit"),
    ([[1, 2], [[1], 2]], "state 1 does not fit"),
    ([[1, "2"]], "state 0 does not fit"),
    ([[0, 0], [1e300, 0]], "state 1 has a number that float32 cannot hold"),
]
MALFORMED: list[dict[str, Any]] = [
    {},
    {"state": [1, 2], "states": [[1, 2]]},
    {"states": [[1, 2]], "episodes": []},
    {"states": [[1, 2]], "server": "a\nb"},
    {"state": {"x": 1}},
    {"state": [1, 2], "temperature": 1},
    {"states": [[0, 0]] * 4097},
    {"finished": [{"episode": "e", "steps": 1, "episode_return": "lots"}]},
    {"state": [1, 2], "instance_key": "short"},
]


async def test_requests_of_a_wrong_form_are_refused_with_index_and_reason(serving: Any, head: Any) -> None:
    async with serving(head()) as client:

        async def send(content: str | bytes) -> Any:
            return await client.post("/evaluate", content=content, headers={"Content-Type": "application/json"})

        for states, says in WRONG:
            reply = await send(json.dumps({"states": states}))
            assert reply.status_code in (400, 422)
            assert reply.status_code == 400 or says in reply.json()["detail"], says
        for body in MALFORMED:
            await ask(client, 422, **body)
        assert "['times']" in (await ask(client, 404, policy="other", state=[1, 2]))["detail"]
        assert (await send('{"state": [NaN, 1]}')).status_code == 400
        assert (await send(b" " * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await ask(client, state=[1, 1]))["action"] == [3.0, 3.0]


async def test_a_policy_that_gives_nan_fails_those_states_only(serving: Any, head: Any) -> None:
    async with serving(head(head_batch_size=2, head_timeout_ms=10_000)) as client:
        bad, good = await asyncio.gather(
            client.post("/evaluate", json={"state": [-1, 0]}), client.post("/evaluate", json={"state": [2, 0]})
        )
        assert (bad.status_code, good.status_code) == (500, 200)
        assert "gave NaN" in bad.json()["detail"]
        assert (await client.get("/stats")).json()["policies"][0]["batch_sizes"] == {"2": 1}


async def test_overload_is_refused_with_retry_after(serving: Any, head: Any) -> None:
    async with serving(head(head_batch_size=10, head_timeout_ms=10_000, MAX_WAITING=10)) as client:
        waiting = asyncio.create_task(ask(client, states=[[0, 0]] * 8))
        await stats_show(client, lambda stats: stats["policies"][0]["waiting"] == 8)
        refused = await client.post("/evaluate", json={"states": [[0, 0]] * 3})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert "8 states wait already, allowed are 10" in refused.json()["detail"]
        await ask(client, states=[[0, 0]] * 2)  # which fill the batch
        await waiting
        assert (await client.get("/stats")).json()["overloaded"] == 1


async def test_episodes_are_counted_once(serving: Any, head: Any) -> None:
    async with serving(head()) as client:
        about = {"server": "s1", "instance_key": KEY, "environment": "Game-v0"}
        for step in (0, 1, 1):
            episodes = [{"episode": e, "step": step, "episode_return": float(step)} for e in ("a", "b")]
            await ask(client, states=[[0, 0]] * 2, episodes=episodes, **about)
        stats = (await client.get("/stats")).json()
        assert (stats["episodes"]["active"], stats["servers"][0]["active"], stats["states"]) == (2, 2, 6)
        report = {"episode": "a", "steps": 2, "episode_return": 5.0, "seed": 1}
        for _ in range(3):
            assert (await ask(client, finished=[report], **about))["actions"] == []
        # A late repetition does not begin the episode again.
        await ask(client, state=[0, 0], episodes=[{"episode": "a", "step": 1}], **about)
        stats = (await client.get("/stats")).json()
        assert stats["episodes"] == {"active": 1, "finished": 1, "lost": 0}
        server = stats["servers"][0]
        assert (server["mode"], server["environment"], server["state"]) == ("pushing", "Game-v0", "connected")
        assert server["returns"] == {"count": 1, "mean": 5.0, "deviation": None}
        await ask(client, finished=[report | {"episode": "b", "episode_return": 8.0}], **about)
        [server] = (await client.get("/stats")).json()["servers"]
        assert server["returns"] == {"count": 2, "mean": 6.5, "deviation": pytest.approx(math.sqrt(4.5))}


async def test_an_idle_episode_counts_as_lost(serving: Any, head: Any) -> None:
    async with serving(head(IDLE_SECONDS=0.2)) as client:
        await ask(client, state=[0, 0], episodes=[{"episode": "a"}], server="s")
        stats = await stats_show(client, lambda stats: stats["episodes"]["lost"] == 1)
        assert stats["episodes"]["active"] == 0


async def test_a_name_belongs_to_the_server_with_its_key(
    serving: Any, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(head(SILENT_SECONDS=IDLE_SECONDS)) as client:
        await ask(client, state=[0, 0], server="s", instance_key=KEY, episodes=[{"episode": "a"}])
        liar = await ask(client, 409, state=[0, 0], server="s", instance_key=OTHER_KEY)
        assert "ENVIRONMENT_SERVER_NAME" in liar["detail"]
        await ask(client, 409, state=[0, 0], server="s")
        await ask(client, 409, finished=[{"episode": "a", "steps": 1, "episode_return": 1e9}], server="s")
        stats = (await client.get("/stats")).json()
        assert (stats["episodes"]["finished"], stats["servers"][0]["requests"]) == (0, 1)
        # A restarted server has a new key; it gets its name back when the old one is silent.
        monkeypatch.setattr(registry, "SILENT_SECONDS", 0.0)
        await stats_show(client, lambda stats: stats["servers"][0]["state"] == "silent")
        await ask(client, state=[0, 0], server="s", instance_key=OTHER_KEY)
        assert (await client.get("/stats")).json()["episodes"]["lost"] == 1


async def test_a_head_without_policies_or_with_bad_ones_does_not_start(serving: Any, head: Any, tmp_path: Path) -> None:
    (tmp_path / "junk.pt2").write_bytes(b"not a policy")
    torch.save({"a": 1}, tmp_path / "other.pt2")
    (tmp_path / "empty").mkdir()
    for policies_text, says in [
        ("", "HEAD_POLICIES is empty"),
        (f"p={tmp_path}/missing", "no policy at"),
        (f"p={tmp_path}/junk.pt2", "cannot be read"),
        (f"p={tmp_path}/other.pt2", "cannot be read"),
        (f"p={tmp_path}/empty", "a directory of versions"),
    ]:
        with pytest.raises(ConfigurationError, match=says):
            async with serving(head(head_policies=policies_text)):
                pass


def test_policies_are_named(head: Any) -> None:
    for text in ("nameless", "=x", "a=x a=y", "a b=x", "$=x", "a=head+http://host:8080"):
        with pytest.raises(ValueError, match="head_policies"):
            head(head_policies=text)


async def test_an_unusable_version_leaves_the_old_one_in_use(serving: Any, head: Any, tmp_path: Path) -> None:
    policies.publish_times(tmp_path, 1)
    async with serving(head(head_policies=f"p={tmp_path}", RELOAD_SECONDS=0.05)) as client:
        (tmp_path / "v000002").mkdir()
        (tmp_path / "v000002" / "policy.pt2").write_bytes(b"broken")
        await stats_show(client, lambda stats: "cannot be read" in (stats["policies"][0]["trouble"] or ""))
        policies.publish_lean(tmp_path, 3)
        await stats_show(client, lambda stats: "other states or actions" in (stats["policies"][0]["trouble"] or ""))
        assert (await ask(client, state=[1, 1]))["policy_versions"] == [1]
        policies.publish_times(tmp_path, 4)
        stats = await stats_show(client, lambda stats: stats["policies"][0]["version"] == 4)
        assert stats["policies"][0]["trouble"] is None


async def test_every_action_comes_from_the_version_it_is_labelled_with(serving: Any, head: Any, tmp_path: Path) -> None:
    policies.publish_times(tmp_path, 1)
    async with serving(head(head_policies=f"p={tmp_path}", RELOAD_SECONDS=0.02, head_batch_size=4)) as client:
        seen: set[int] = set()
        for version in (2, 3):
            policies.publish_times(tmp_path, version)
            deadline = Deadline(f"version {version}")
            while version not in seen:
                deadline.check()
                reply = await ask(client, states=[[1, 1]] * 16)
                assert [action[0] for action in reply["actions"]] == reply["policy_versions"]
                seen |= set(reply["policy_versions"])


@pytest.mark.slow
async def test_the_head_runs_as_a_process_and_reads_its_flags(start_service: Any, times: Path) -> None:
    service = start_service(
        "services.evaluation_head", "--policies", f"times={times}", "--batch-size", "7", "--timeout-ms", "2"
    )
    async with httpx.AsyncClient(base_url=service.url, timeout=IDLE_SECONDS, trust_env=False) as client:
        assert (await ask(client, state=[1, 2]))["action"] == [3.0, 6.0]
        policy = (await client.get("/stats")).json()["policies"][0]
        assert (policy["batch_size"], policy["timeout_ms"]) == (7, 2.0)
    assert service.terminate() == 0
