"""The Wordle of the recipe: marks by hand, and the rewards of games won and lost."""

from __future__ import annotations

import asyncio

import pytest

from recipes.wordle import GUESSES, WORDS, Wordle, marks
from services.environment_server.environments import Transition


def test_a_letter_has_no_more_marks_than_the_word_has_of_it() -> None:
    pairs = [("crane", "crane"), ("sheet", "these"), ("sheet", "stone"), ("level", "steel"), ("queue", "river")]
    assert [marks(*pair) for pair in pairs] == ["GGGGG", "YGGYY", "GXYXY", "XYXGG", "XXYXX"]


def test_the_words_have_five_letters_and_are_different() -> None:
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)


def play(seed: int, guesses: list[str]) -> tuple[str, list[Transition]]:
    async def game() -> tuple[str, list[Transition]]:
        environment = Wordle()
        await environment.reset(seed)
        return environment._secret, [await environment.step(guess) for guess in guesses]

    return asyncio.run(game())


def test_a_game_won_has_more_the_fewer_guesses_it_took() -> None:
    secret, _ = play(3, [])
    wrong = next(word for word in WORDS if not set(word) & set(secret))
    tagged = [f"Hm. <guess>[{word}]</guess>" for word in (wrong, secret)]
    _, [first, last] = play(3, tagged)
    assert (first.reward, first.terminated) == (0.0, False)
    assert "X X X X X" in str(first.state)
    assert last.reward == pytest.approx(1 + 1 / 2 + 0.2)
    assert (last.terminated, dict(last.figures)) == (True, {"won": 1.0})


def test_a_game_lost_has_what_its_last_word_had() -> None:
    secret, _ = play(3, [])
    near = secret[:4] + ("q" if secret[4] != "q" else "z")
    answers = ["no tags"] * (GUESSES - 1) + [f"<guess>{near}</guess>"]
    _, steps = play(3, answers)
    assert [step.terminated for step in steps] == [False] * (GUESSES - 1) + [True]
    assert steps[-1].reward == pytest.approx(0.2 * 4 + 0.2 / GUESSES)
    assert dict(steps[-1].figures) == {"won": 0.0}
