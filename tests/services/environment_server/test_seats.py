"""Several seats: absent from the wire of one seat, checked against the environment, refused where one seat is meant."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import ConfigurationError
from tests.services.environment_server.test_openenv_server import playing
from tests.services.run_page.serving import served_ready

ODD = "tests.services.environment_server.odd_environments"


async def test_an_environment_of_one_seat_says_nothing_of_seats(serving: Any, app: Any) -> None:
    async with serving(app(environment="guessing")) as client:
        reset = (await client.post("/reset", json={"seed": 1})).json()
        [start] = reset["episodes"]
        assert "seats" not in reset["environment"]
        assert set(start) == {"episode", "seed", "state"}
        item = {"episode": start["episode"], "step": 0, "action": "50"}
        [result] = (await client.post("/step", json={"steps": [item]})).json()["results"]
        assert not result.keys() & {"seat", "rewards", "figures"}


async def test_a_game_whose_rewards_are_not_one_a_seat_is_lost(serving: Any, app: Any) -> None:
    async with serving(app(environment=f"{ODD}:HalfAGame")) as client:
        [start] = (await client.post("/reset", json={"seed": 1})).json()["episodes"]
        item = {"episode": start["episode"], "step": 0, "action": "go"}
        [result] = (await client.post("/step", json={"steps": [item]})).json()["results"]
        assert result["status"] == "lost"
        assert "2 seats" in result["detail"]


async def test_a_session_of_openenv_refuses_a_game_of_two_seats(app: Any) -> None:
    with served_ready(app(environment="nim")) as url:
        async with playing(url) as player:
            frame = await player.say("reset", {"seed": 1})
            assert (frame["type"], frame["data"]["code"]) == ("error", "VALIDATION_ERROR")
            assert "2 seats" in frame["data"]["message"]


async def test_a_server_that_pushes_refuses_a_game_of_two_seats(serving: Any, app: Any) -> None:
    with pytest.raises(ConfigurationError, match="2 seats"):
        async with serving(app(environment="nim", eval_head_endpoint="http://127.0.0.1:9")):
            pass
