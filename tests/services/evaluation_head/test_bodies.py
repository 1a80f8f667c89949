"""POST /evaluate with states as bytes: the answers of the JSON body, and refusals that say what was expected."""

from __future__ import annotations

from typing import Any

import httpx
import msgpack
import numpy as np

RAW = {"Content-Type": "application/octet-stream"}
PACKED = {"Content-Type": "application/msgpack"}
FUNCTION = "tests.services.evaluation_head.test_bodies:kinds"


def kinds(states: list[Any]) -> list[str]:
    """A policy that answers with the types of its states."""
    return [f"{type(state).__name__} of {type(state[0]).__name__}" for state in states]


async def send(client: httpx.AsyncClient, kind: str, states: Any, shape: Any = None, **fields: Any) -> httpx.Response:
    """Send states, an array or bytes, in a body of one kind."""
    content = states if isinstance(states, bytes) else states.astype("<f4").tobytes()
    shape = list(states.shape) if shape is None else shape
    if kind == "msgpack":
        return await client.post(
            "/evaluate", content=msgpack.packb({**fields, "states": content, "shape": shape}), headers=PACKED
        )
    text = ",".join(map(str, shape)) if isinstance(shape, list) else shape
    return await client.post("/evaluate", content=content, params={**fields, "shape": text}, headers=RAW)


async def test_bytes_get_the_answer_of_json(serving: Any, head: Any) -> None:
    states = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    async with serving(head(head_batch_size=8)) as client:
        about = {"policy": "times", "server": "s", "logprobs": True}
        expected = await client.post("/evaluate", json={**about, "states": states.tolist()})
        for kind in ("raw", "msgpack"):
            reply = await send(client, kind, states, **about)
            assert (reply.status_code, reply.json()) == (200, expected.json())
            assert len(reply.json()["actions"]) == 30
        assert (await client.get("/stats")).json()["servers"][0]["states"] == 90
    async with serving(head(head_policies=f"kinds={FUNCTION}")) as client:
        for kind in ("raw", "msgpack"):
            assert (await send(client, kind, np.ones((2, 3)))).json()["actions"] == ["list of float"] * 2


async def test_messagepack_reports_episodes_as_json_does(serving: Any, head: Any) -> None:
    async with serving(head()) as client:
        reply = await send(client, "msgpack", np.ones((2, 2)), episodes=[{"episode": "a"}, {"episode": "b"}])
        assert reply.status_code == 200
        finished = [{"episode": "a", "steps": 1, "episode_return": 2.5}]
        reports = await client.post("/evaluate", content=msgpack.packb({"finished": finished}), headers=PACKED)
        assert reports.json()["actions"] == []
        stats = (await client.get("/stats")).json()
        assert (stats["episodes"], stats["returns"]["mean"]) == ({"active": 1, "finished": 1, "lost": 0}, 2.5)
        # One episode for two states.
        assert (await send(client, "msgpack", np.ones((2, 2)), episodes=[{"episode": "a"}])).status_code == 422


WRONG: list[tuple[Any, Any, str]] = [
    (b"\0" * 15, [2, 2], "states are 15 bytes; [2, 2] of float32 are 16 bytes"),
    (b"\0" * 16, [2, 3], "states are 16 bytes; [2, 3] of float32 are 24 bytes"),
    (b"", [0, 2], "shape is"),
    (b"", [1_000_000_000, 0], "shape is"),
    (b"\0" * 16, "2x2", "shape is '2x2'"),
    (b"\0" * 16, [], "shape is"),
    (np.array([[1, 2], [np.nan, 0]]), None, "state 1 has NaN or an infinity"),
    (np.array([[1, 2], [0, -np.inf]]), None, "state 1 has NaN or an infinity"),
    (np.zeros((2, 3)), None, "state 0 does not fit: policy 'times' takes numbers of shape [2]"),
    (np.zeros(4), None, "state 0 does not fit"),
    (np.zeros((4097, 1)), None, "at most 4096"),
]
FIELDS: list[tuple[dict[str, Any], int, str]] = [
    ({"temperature": 1}, 422, "temperature"),
    ({"state": [1, 2]}, 422, "state is for JSON"),
    ({"policy": "other"}, 404, "['times']"),
]
MALFORMED: list[tuple[bytes, int, str]] = [
    (b"\xc1", 400, "not valid MessagePack"),
    (b"\x91" * 5000, 400, "not valid MessagePack"),
    (b"", 400, "not valid MessagePack"),
    (msgpack.packb([1]), 422, "must be a map"),
    (msgpack.packb({"states": [[1.0, 2.0]], "shape": [1, 2]}), 422, "states are list; [1, 2] of float32 are 8"),
    (msgpack.packb({"states": b"\0" * 8}), 422, "shape is None"),
    (msgpack.packb({}), 422, "give state, states, or finished"),
]


async def test_wrong_bodies_are_refused(serving: Any, head: Any) -> None:
    async with serving(head()) as client:
        replies = [
            (await client.post("/evaluate", content=body, headers=PACKED), *refusal) for body, *refusal in MALFORMED
        ]
        for kind in ("raw", "msgpack"):
            replies += [(await send(client, kind, states, shape), 422, says) for states, shape, says in WRONG]
            replies += [(await send(client, kind, np.ones((1, 2)), **more), *refusal) for more, *refusal in FIELDS]
            assert (await send(client, kind, np.ones((1, 2)))).json()["actions"] == [[3.0, 3.0]]
    for reply, status, says in replies:
        assert (reply.status_code, says in reply.json()["detail"]) == (status, True), (says, reply.text)


async def test_bytes_need_the_token_and_have_the_limit_of_json(serving: Any, head: Any) -> None:
    from services.evaluation_head.app import MAX_BODY_BYTES

    async with serving(head(jobgroup_token="secret"), token="secret") as client:
        too_large = await send(client, "raw", b"\0" * (MAX_BODY_BYTES + 4), [1, MAX_BODY_BYTES // 4 + 1])
        assert too_large.status_code == 413
        del client.headers["Authorization"]
        assert (await send(client, "raw", np.ones((1, 2)))).status_code == 401
