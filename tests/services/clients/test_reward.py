"""The requests that the reward-server's client makes."""

from __future__ import annotations

from typing import Any

import pytest

from services.clients import reward
from services.clients.reward import RewardClient
from services.protocol.rewards import RewardItem
from tests.fake_service import fake_service


def numbers(request: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": [{"reward": float(item["response"])} for item in request["items"]]}


async def test_a_request_is_bounded_in_answers_and_in_size_and_has_each_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward, "REWARDS_A_REQUEST", 3)
    monkeypatch.setattr(reward, "CHARACTERS_A_REQUEST", 1000)
    rows = ['{"a": "' + letter * 600 + '"}' for letter in "xy"]
    chosen = [rows[0]] * 4 + [rows[1], None, rows[1]]
    items = [RewardItem(prompt="", response=str(i), ground_truth="", row=row) for i, row in enumerate(chosen)]
    with fake_service({"POST /batch_reward": numbers}) as service:
        async with RewardClient(service.endpoint, deadline=20) as client:
            results = await client.score(items)
    assert [result.reward for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    requests = sorted(service.asked("POST /batch_reward"), key=lambda request: int(request["items"][0]["response"]))
    assert [len(request["items"]) for request in requests] == [3, 1, 3]
    assert [list(request["rows"].values()) for request in requests] == [[rows[0]], [rows[0]], [rows[1]]]
