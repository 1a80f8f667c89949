from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.protocol.ground_truths import Entry
from services.protocol.rewards import FinishReason, RewardItem, RewardStatus
from services.reward_server import reasoning
from services.reward_server.answers import find_tagged
from services.reward_server.app import create_app
from services.reward_server.settings import RewardSettings

gym = pytest.importorskip("reasoning_gym.factory", reason="no reasoning-gym, which needs a C compiler")

# Their questions take half a second and more to make.
SLOW = {"knight_swap", "sokoban"}
GENERATORS = sorted(gym.DATASETS.keys() - {"composite"} - SLOW)


def ground_truth(generator: str, **parameters: Any) -> tuple[dict[str, Any], str]:
    made = gym.create_dataset(generator, size=1, seed=3, **parameters)[0]
    return made, Entry(generator, parameters, made).to_json()


@pytest.fixture(scope="module")
def entries() -> dict[str, tuple[dict[str, Any], str]]:
    return {generator: ground_truth(generator) for generator in GENERATORS}


def test_right_answers_of_all_generators_score_one_from_the_ground_truth_alone(entries: Any) -> None:
    assert len(entries) > 100
    scores = {name: reasoning.score(made["answer"], truth) for name, (made, truth) in entries.items() if made["answer"]}
    assert len(scores) >= 98
    assert {name: value for name, value in scores.items() if value != 1.0} == {}


def test_answers_of_the_wrong_form_are_wrong_for_all_generators(entries: Any) -> None:
    for answer in ("a word", "[1, 2, 3]", '{"a": 1}', "0"):
        for name, (_, truth) in entries.items():
            assert 0 <= reasoning.score(answer, truth) <= 1, (name, answer)
    assert reasoning.score("a word", entries["prime_factorization"][1]) == 0


def test_no_generator_runs_an_answer_as_code(entries: Any, tmp_path: Path) -> None:
    call = f"__import__('os').mkdir({str(tmp_path / 'made')!r})"
    for name, (_, truth) in entries.items():
        for answer in (call, f"[{call}]", f"1 + {call}", f"[[{call}]]", f"x**2 + {call}"):
            reasoning.score(answer, truth)
            assert not (tmp_path / "made").exists(), name


def test_a_long_answer_costs_no_more_than_its_length(entries: Any) -> None:
    before = time.process_time()
    reasoning.score("1" * 100_000 + "_", entries["countdown"][1])
    assert time.process_time() - before < 1


def test_the_scoring_has_the_parameters_of_the_question() -> None:
    # Answers are compared to as many decimal places as the questions may have.
    for places, value in ((6, 0.0), (2, 1.0)):
        _, truth = ground_truth("decimal_arithmetic", min_num_decimal_places=1, max_num_decimal_places=places)
        found = Entry.from_json(truth)
        near = Entry(found.generator, found.parameters, {**found.content, "answer": "1.000"})
        assert reasoning.score("1.0001", near.to_json()) == value


def test_the_answer_is_in_the_last_element_or_on_the_last_line_unless_the_response_was_cut() -> None:
    for response, answer in {
        "I answer in <answer> tags.\n<answer>\n1 2\n3 4 </answer> Done.": "1 2\n3 4",
        "<answer>1</answer> no, <answer>2</answer>": "2",
        "<answer> </answer>": None,
        "So it is\n 7 \n\n": "7",
        "</answer>\n7": "7",
        " \n": None,
    }.items():
        assert find_tagged(response, truncated=False) == answer
    assert find_tagged("so\n12", truncated=True) is None
    assert find_tagged("<answer>12</answer> and", truncated=True) == "12"


async def test_answers_are_scored_by_workers(scoring: Any) -> None:
    made, truth = ground_truth("chain_sum")

    def item(response: str, truth: str = truth, **more: Any) -> RewardItem:
        return RewardItem(prompt="q", response=response, ground_truth=truth, **more)

    # Made with parameters of its own, which takes longer than an answer may.
    _, board = ground_truth("arc_agi", rotations_weights=[1, 0, 0, 0])
    async with scoring(reward_fn="reasoning_gym", reward_timeout_seconds=60) as scorer:
        right, wrong, cut, other, puzzle = await scorer.score(
            [
                item(f"Let me see.\n<answer>{made['answer']}</answer>"),
                item("<answer>x</answer>"),
                item(made["answer"], finish_reason=FinishReason.LENGTH),
                item("7", truth="7"),
                item("0 1", truth=board),
            ]
        )
    assert (right.reward, right.extracted) == (1.0, made["answer"])
    assert (wrong.reward, cut.reward) == (0.0, 0.0)
    assert (other.reward, other.status) == (None, RewardStatus.ERROR)
    assert puzzle.status is RewardStatus.SCORED, puzzle.reason


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="reasoning-gym"):
        create_app(RewardSettings(reward_fn="reasoning_gym"))
