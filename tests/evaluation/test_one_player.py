"""A prompt is evaluated inside a run and by ``grpo evaluate`` alike: the same tokens and the same score, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from evaluation.plan import Plan
from evaluation.servers import parse_url
from evaluation.settings import EvaluationSettings
from services.clients.data import DataClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.models import vocabulary_size
from services.core.tasks import ServiceThread
from services.protocol.groups import TokenSequence
from services.protocol.prompts import Cursor, Prompt, PromptBatch
from services.run_page.progress import Activity
from tests.evaluation.conftest import ARITHMETIC, Here
from trainer.config import TrainerSettings
from trainer.rollouts.evaluate import Evaluator
from trainer.rollouts.groups import Completions

SAMPLES, PROMPTS, SEED = 3, 8, 5
Played = dict[tuple[str, float], list[TokenSequence]]


class HeldOut:
    """The held-out prompts of a data-server."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    async def prompts(self, number: int, *_: Any, **__: Any) -> PromptBatch:
        return PromptBatch(prompts=self._prompts[:number], cursor=Cursor(), total_available=len(self._prompts))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """The completions that engines gave since the last look, by prompt and temperature."""
    found: Played = {}
    complete = RolloutClient.complete

    async def kept(client: RolloutClient, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Any:
        found[prompt.id, params.temperature] = completions = await complete(client, prompt, params, n, seed)
        return completions

    monkeypatch.setattr(RolloutClient, "complete", kept)
    return found


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_a_prompt_has_the_same_tokens_and_score_inside_a_run_and_by_the_command(
    here: Here,
    engine: str,
    rewards: str,
    tiny_model: Path,
    played: Played,
    monkeypatch: pytest.MonkeyPatch,
    deterministic: str,
) -> None:
    for name, value in {**ARITHMETIC, "SEED": str(SEED), "ENGINE_DETERMINISTIC": deterministic}.items():
        monkeypatch.setenv(name, value)
    given = ("--model", tiny_model, "--url", engine, "--reward-url", rewards, "--limit", PROMPTS, "--samples", SAMPLES)
    command = here(*given)
    by_command = dict(played)
    played.clear()

    settings = TrainerSettings.load(model_name=str(tiny_model), eval_prompts=PROMPTS, eval_samples=SAMPLES)
    prompts = Plan(EvaluationSettings(), model=str(tiny_model)).examples()[""].prompts
    data, scored = cast(DataClient, HeldOut(prompts)), RewardClient(parse_url(rewards))
    size = vocabulary_size(str(tiny_model), "MODEL_NAME")
    rollouts = RolloutClient(parse_url(engine), vocab_size=size, seed_each_completion=settings.engine_deterministic)
    results: dict[str, list[Any]] = {}

    class Recorded(Completions):
        async def answer(self, prompt: Prompt, *arguments: Any, **options: Any) -> Any:
            answers = await super().answer(prompt, *arguments, **options)
            results[prompt.id] = results.get(prompt.id, []) + [one.scoring for one in answers.sequences]
            return answers

    evaluator = Evaluator(settings, data, {"": Recorded(settings, rollouts, scored)}, Activity())
    with ServiceThread() as thread:
        thread.call(scored.__aenter__())
        thread.call(rollouts.__aenter__())
        metrics = thread.call(evaluator.evaluate())

    assert len(played) == 2 * PROMPTS
    assert played == by_command
    for prompt in prompts[:PROMPTS]:
        samples = [sample for sample in command.samples() if sample["prompt_id"] == prompt.id]
        samples.sort(key=lambda sample: (sample["kind"], sample["index"]))
        assert [sample["result"] for sample in samples] == [one.model_dump(mode="json") for one in results[prompt.id]]
    for column, name in (("accuracy", "greedy pass@1"), ("avg_at_3", "avg@3"), ("pass_at_3", "pass@3")):
        estimate = command.results["metrics"][name]
        assert (metrics[column], metrics[f"{column}_low"]) == (estimate["value"], estimate["low"])
    assert 0 < metrics["avg_at_3"] < 1
