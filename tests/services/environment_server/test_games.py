"""Nim: what wins, illegal answers, and the solution against a search of all games; and the rules of several seats."""

from __future__ import annotations

from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.environment_server.games import ILLEGAL_ANSWERS, MOST_STONES, NAMES, OPENING, Nim, draw_heaps, is_optimal
from tests.services.environment_server.test_openenv_server import playing
from tests.services.run_page.serving import served_ready


def moves_of(heaps: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(heap, stones) for heap, size in enumerate(heaps) for stones in range(1, size + 1)]


def after(heaps: tuple[int, ...], heap: int, stones: int) -> tuple[int, ...]:
    return (*heaps[:heap], heaps[heap] - stones, *heaps[heap + 1 :])


@cache
def wins(heaps: tuple[int, ...]) -> bool:
    """Return whether the player to move wins, by a search of all games."""
    return any(not wins(after(heaps, *move)) for move in moves_of(heaps))


def test_the_optimal_moves_are_those_that_a_search_of_all_games_finds() -> None:
    for heaps in product(range(MOST_STONES + 1), repeat=3):
        for move in moves_of(heaps):
            expected = not wins(after(heaps, *move)) if wins(heaps) else None
            assert is_optimal(heaps, *move) is expected, (heaps, move)


def test_either_side_wins_half_of_the_drawn_games() -> None:
    drawn = [tuple(draw_heaps(seed)) for seed in range(1000)]
    assert drawn == [tuple(draw_heaps(seed)) for seed in range(1000)]
    assert 0.45 < fmean(map(wins, drawn)) < 0.55
    assert {len(heaps) for heaps in drawn} == {2, 3}
    assert {stones for heaps in drawn for stones in heaps} == set(range(1, MOST_STONES + 1))


async def test_the_winning_side_wins_by_optimal_moves() -> None:
    for seed in range(40):
        heaps = tuple(draw_heaps(seed))
        first_wins = wins(heaps)
        game = Nim()
        await game.reset(seed)
        seat, transition = 0, None
        while transition is None or not transition.terminated:
            best = [move for move in moves_of(heaps) if is_optimal(heaps, *move)]
            heap, stones = (best or moves_of(heaps))[0]
            assert transition is None or transition.seat == seat
            transition = await game.step(f"I take {NAMES[heap]}{stones}.")
            assert transition.figures == {"legal_moves": 1.0} | ({"optimal_moves": 1.0} if best else {})
            heaps, seat = after(heaps, heap, stones), 1 - seat
        assert transition.rewards == ((1.0, -1.0) if first_wins else (-1.0, 1.0))
        assert transition.reward == transition.rewards[0]


@pytest.mark.parametrize("answer", ["I resign", "D1", "A0", "A9", "C1", "b1", "A: 2, B: 2"])
async def test_an_illegal_answer_is_a_turn_and_the_third_of_a_seat_loses(answer: str) -> None:
    seed = next(seed for seed in range(100) if draw_heaps(seed) == [2, 2])
    game = Nim()
    first = await game.reset(seed)
    assert "A: 2, B: 2" in first[-1]["content"]
    await game.step("A1")
    for count in range(1, ILLEGAL_ANSWERS):
        transition = await game.step(answer)
        assert (transition.seat, transition.rewards, transition.terminated) == (1, (0.0, 0.0), False), count
        assert "A: 1, B: 2" in transition.state[-1]["content"]
        assert transition.figures == {"legal_moves": 0.0}
    last = await game.step(answer)
    assert (last.rewards, last.terminated) == ((1.0, -1.0), True)


async def test_each_seat_has_its_own_conversation(serving: Any, app: Any) -> None:
    seed = next(seed for seed in range(100) if draw_heaps(seed) == [1, 2])
    async with serving(app(environment="nim")) as client:
        [start] = (reset := (await client.post("/reset", json={"seed": seed})).json())["episodes"]
        assert (reset["environment"]["seats"], start["seat"]) == (2, 0)

        async def step(number: int, answer: str) -> dict[str, Any]:
            item = {"episode": start["episode"], "step": number, "action": answer}
            return (await client.post("/step", json={"steps": [item]})).json()["results"][0]

        first = await step(0, "B1")
        assert (first["seat"], first["rewards"], first["figures"]) == (
            1,
            [0, 0],
            {"legal_moves": 1, "optimal_moves": 1},
        )
        assert first["state"] == [*OPENING, {"role": "user", "content": "I took B1. A: 1, B: 1"}]
        second = await step(1, "A1")
        assert "optimal_moves" not in second["figures"]
        assert [message["content"] for message in second["state"][3:]] == ["A: 1, B: 2", "B1", "I took A1. A: 0, B: 1"]
        assert await step(1, "A1") == second
        last = await step(2, "B1")
        assert (last["status"], last["seat"], last["rewards"]) == ("terminated", 0, [1, -1])
        assert last["episode_return"] == 1


# --- seats -----------------------------------------------------------------------------------------------------------


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
