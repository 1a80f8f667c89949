"""Answers without a reward: those over the verifier's limits are wrong, the others are left out."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from evaluation import metrics
from evaluation.evaluation import Evaluation, SingleTurn
from evaluation.plan import Checkpoint
from evaluation.settings import EvaluationSettings
from evaluation.store import Kind, Sample, open_store
from services.clients.rollout import SamplingParams
from services.protocol.accuracy import GREEDY
from services.protocol.groups import TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardItem, RewardResult, RewardStatus

RESULTS = {
    "right": RewardResult(reward=1.0),
    "wrong": RewardResult(reward=0.0),
    "over": RewardResult(reward=None, status=RewardStatus.OVER_LIMIT),
    "again over": RewardResult(reward=None, status=RewardStatus.OVER_LIMIT),
    "error": RewardResult(reward=None, status=RewardStatus.ERROR),
}
PROMPTS = [Prompt(id=name, prompt=name, ground_truth="7") for name in RESULTS]


def sample(prompt: Prompt) -> Sample:
    return Sample(
        prompt_id=prompt.id,
        kind=Kind.GREEDY,
        index=0,
        prompt=prompt.prompt,
        ground_truth=prompt.ground_truth,
        completion="7",
        finish_reason=FinishReason.STOP,
        prompt_tokens=4,
        completion_tokens=2,
        seconds=0.1,
        result=RESULTS[prompt.id],
    )


class Engines:
    """Engines that give every prompt the same completion."""

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[TokenSequence]:
        two = np.zeros(2, np.int32)
        given = {"completion_ids": two, "logprobs": np.zeros(2), "policy_versions": two}
        return [TokenSequence(completion="7", finish_reason=FinishReason.STOP, **given)]


async def test_answers_over_a_limit_are_wrong_and_unscored_ones_are_left_out(tmp_path: Path) -> None:
    asked: list[str] = []

    async def score(items: Sequence[RewardItem]) -> list[RewardResult]:
        asked.extend(item.prompt for item in items)
        return [RESULTS[item.prompt] for item in items]

    async def is_healthy() -> bool:
        return True

    model, settings = Checkpoint("m", "org/m"), EvaluationSettings()
    with open_store(tmp_path, {}) as store:
        for attempt in range(2):
            asked.clear()
            evaluation = Evaluation(PROMPTS, 0, SingleTurn(settings, Engines(), score, 8), store, is_healthy)
            await evaluation.run()
            assert sorted(asked) == (sorted(RESULTS) if attempt == 0 else ["error"]), "what was judged is kept"
        left_out = evaluation.progress.left_out
        results = metrics.results_of(
            model, PROMPTS, store.samples, settings, left_out=left_out, identity={}, dataset="d", available=12
        )
    assert (evaluation.progress.correct, evaluation.progress.greedy) == (1, 4)
    accuracy = results.metrics[GREEDY]
    assert (accuracy.value, accuracy.prompts) == (0.25, 4)
    assert accuracy.stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert (results.over_limit, results.left_out) == (2, {"unscored": 1})
    assert metrics.Results.model_validate(results.model_dump()) == results
    printed = io.StringIO()
    metrics.show(Console(file=printed, width=160), results)
    assert "d test, 5 of 12 prompts" in printed.getvalue()
    assert "left out: 1 unscored" in printed.getvalue()
    assert "counted as wrong, over a limit (see samples.jsonl): 2" in printed.getvalue()


def test_categories_are_told_apart_and_prompts_without_one_are_in_none() -> None:
    categories = {"right": "easy", "wrong": "hard", "over": None}
    prompts = [
        Prompt(id=name, prompt=name, ground_truth="7", category=category) for name, category in categories.items()
    ]
    stored = {sample(prompt).key: sample(prompt) for prompt in prompts}
    given: dict[str, Any] = {"left_out": {}, "identity": {}, "dataset": "d"}
    results = metrics.results_of(Checkpoint("m", "org/m"), prompts, stored, EvaluationSettings(), **given)
    assert {name: m[GREEDY].value for name, m in results.categories.items()} == {"easy": 1.0, "hard": 0.0}
    uncategorised = metrics.results_of(Checkpoint("m", "org/m"), prompts[2:], stored, EvaluationSettings(), **given)
    assert uncategorised.categories == {}


def test_sources_count_the_same_whatever_their_numbers_of_prompts() -> None:
    prompts = [
        Prompt(id="right", prompt="right", ground_truth="7", source="maths"),
        Prompt(id="wrong", prompt="wrong", ground_truth="7", source="maths"),
        Prompt(id="over", prompt="over", ground_truth="7", source="maths"),
        Prompt(id="again over", prompt="again over", ground_truth="7", source="maths"),
        Prompt(id="1", prompt="right", ground_truth="7", source="code"),
    ]
    stored = {s.key: s for s in (*(sample(prompt) for prompt in prompts[:4]), sample_of_code(prompts[4]))}
    given: dict[str, Any] = {"left_out": {}, "identity": {}, "dataset": "mix.yaml"}
    results = metrics.results_of(Checkpoint("m", "org/m"), prompts, stored, EvaluationSettings(), **given)
    assert {name: m[GREEDY].value for name, m in results.sources.items()} == {"code": 1.0, "maths": 0.25}
    macro = results.metrics[GREEDY]
    assert (macro.value, macro.prompts) == (0.625, 5)
    assert macro.stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 4) / 2)
    assert macro.low == pytest.approx(0.625 - 1.959964 * macro.stderr)
    printed = io.StringIO()
    metrics.show(Console(file=printed, width=160), results)
    assert "m by source" in printed.getvalue()


def sample_of_code(prompt: Prompt) -> Sample:
    return sample(PROMPTS[0]).model_copy(update={"prompt_id": prompt.id})
