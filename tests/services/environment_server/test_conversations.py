"""The text environments: a guessing game, and questions with a calculator, scored as in training."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from services.core.numbers import clean
from services.environment_server import gsm8k
from services.environment_server.games import GuessingGame
from services.environment_server.gsm8k import CalculationError, calculate
from services.environment_server.settings import TEXT_TURNS


async def play(client: Any, episode: dict[str, Any], *actions: Any) -> list[dict[str, Any]]:
    results = []
    for step, action in enumerate(actions):
        item = {"episode": episode["episode"], "step": step, "action": action}
        results.append((await client.post("/step", json={"steps": [item]})).json()["results"][0])
    return results


async def test_a_number_is_found_by_bisection() -> None:
    game = GuessingGame(10)
    await game.reset(5)
    low, high = 1, 100
    for _ in range(7):
        guess = (low + high) // 2
        transition = await game.step(f"Perhaps {guess}?")
        if transition.terminated:
            break
        reply = transition.state[-1]["content"]
        low, high = (guess + 1, high) if reply == "Higher." else (low, guess - 1)
    assert transition.terminated
    assert transition.reward == 1.0


async def test_a_game_without_the_right_guess_is_truncated(serving: Any, app: Any) -> None:
    async with serving(app(environment="guessing", environment_max_steps=2)) as client:
        episode = (await client.post("/reset", json={"seed": 1})).json()["episodes"][0]
        assert "2 guesses" in episode["state"][0]["content"]
        assert (await play(client, episode, 5))[0]["status"] == "refused", "it takes text alone"
        first, last = await play(client, episode, "no idea", "-5")
        assert first["status"] == "running"
        assert "found no number" in first["state"][-1]["content"]
        assert (last["status"], last["episode_return"]) == ("truncated", 0.0)


async def test_a_conversation_is_named_by_its_class(serving: Any, app: Any) -> None:
    name = "tests.services.environment_server.odd_environments:Echo"
    async with serving(app(environment=name)) as client:
        reply = (await client.post("/reset", json={"seed": 7})).json()
        assert reply["environment"]["state"]["kind"] == "messages"
        [result] = await play(client, reply["episodes"][0], "seven")
        assert (result["status"], result["state"][-1]["content"]) == ("terminated", "seven")


async def test_questions_are_answered_with_the_calculator_and_scored(
    serving: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET", "arithmetic")
    monkeypatch.setenv("REWARD_WORKERS", "1")
    async with serving(app(environment="gsm8k")) as client:
        reset = (await client.post("/reset", json={"seed": 11, "episodes": 3})).json()
        assert reset["environment"]["state"]["kind"] == "messages"
        right, wrong, endless = reset["episodes"]
        a, operation, b = re.search(r"(\d+)\s*([-+*])\s*(\d+)", right["state"][-1]["content"]).groups()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        called, answered = await play(client, right, f"<calc>{a}{operation}{b}</calc>", f"So it is\n#### {value}")
        assert called["state"][-1]["content"] == f"{a}{operation}{b} = {value}"
        assert (called["status"], answered["status"], answered["reward"]) == ("running", "terminated", 1.0)
        assert (await play(client, wrong, "#### 987654"))[-1]["reward"] == 0.0
        *_, last_but_one, last = await play(client, endless, *["<calc>1/0</calc>"] * TEXT_TURNS)
        assert (last_but_one["status"], last["status"]) == ("running", "truncated")
        again = (await client.post("/reset", json={"seed": 11})).json()["episodes"][0]
        assert again["state"] == right["state"]


def test_calls_of_the_calculator_are_found_in_linear_time() -> None:
    assert gsm8k._CALL.findall("<calc>1<calc>1 +\n1</calc>, <calc></calc>") == ["1 +\n1", ""]
    # Processor time of this thread: no other process adds to it. What took quadratic time would take minutes.
    before = time.thread_time()
    assert gsm8k._CALL.findall("<calc>" * 50_000) == []
    assert clean("^" + " " * 50_000 + "x")[-1] == "x"
    assert (clean(r"90^\circ"), clean(r"90 ^ { \circ }")) == ("90 degrees", "90  degrees")
    assert time.thread_time() - before < 1


def test_the_calculator_is_exact_and_refuses_anything_but_bounded_arithmetic() -> None:
    for expression, value in [
        ("1+2*3", "7"),
        ("(1 + 2) * 3", "9"),
        ("1/3", "0.333333"),
        ("0.1+0.2", "0.3"),
        ("-2/3", "-0.666667"),
        ("$1,200 * 5%", "60"),
        ("200/50%", "400"),
        ("-(20 + 30)% * 4", "-2"),
        ("7 × 8 − 6 ÷ 2", "53"),  # noqa: RUF001
        ("2*-3", "-6"),
    ]:
        assert calculate(expression) == value
    only_numbers = ["9**9", "open('f')", "x+1", "True+1"]
    impossible = ["1+", "50%5", "", "(" * 150, "*".join(["1e308"] * 30), "1e400", "\x00"]
    refused = [
        ("1/0", "zero"),
        ("1" * 201, "more than 200"),
        *((expression, "only numbers") for expression in only_numbers),
    ]
    for expression, says in [*refused, *((expression, "cannot be calculated") for expression in impossible)]:
        with pytest.raises(CalculationError, match=says):
            calculate(expression)
