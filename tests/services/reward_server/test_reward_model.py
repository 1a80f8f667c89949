from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.core.errors import ConfigurationError
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_server.app import create_app
from services.reward_server.settings import RewardSettings
from tests.waiting import wait_ready


def _save(directory: Path, *, labels: int, positions: int = 2048, **tokens: str) -> str:
    """Write a random reward model of a few thousand parameters with a tokenizer of one token a byte."""
    import torch
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from tests.toy_models import byte_tokenizer

    tokenizer = byte_tokenizer(["</s>"], **(tokens or {"eos_token": "</s>"}))
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        max_position_embeddings=positions,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _save(tmp_path_factory.mktemp("model"), labels=1)


async def test_answers_are_scored_in_batches_as_one_by_one_and_too_long_ones_not_at_all(
    serving: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.reward_server import reward_model

    monkeypatch.setattr(reward_model, "BATCH_SIZE", 4)
    monkeypatch.setattr(reward_model, "MAX_TOKENS", 64)
    options = {"reward_fn": "reward_model", "reward_model": model}
    items = [{"prompt": "What is 2 + 2?", "response": "4" * i, "ground_truth": ""} for i in (1, 5, 9, 30, 100)]
    async with serving(create_app(RewardSettings(**options))) as client:
        together = (await client.post("/batch_reward", json={"items": items})).json()["rewards"]
        alone = [(await client.post("/reward", json=item)).json() for item in items]
    assert [r["reward"] for r in together[:4]] == pytest.approx([r["reward"] for r in alone[:4]], abs=1e-5)
    assert len({round(r["reward"], 4) for r in together[:4]}) == 4
    assert together[4]["status"] == RewardStatus.ERROR


async def test_a_conversation_longer_than_the_models_positions_is_not_scored(tmp_path: Path) -> None:
    from services.reward_server.reward_model import RewardModel

    model = RewardModel(_save(tmp_path, labels=1, positions=32))
    async with model.serving():
        long = await model.score(RewardItem(prompt="a" * 16, response="b" * 17, ground_truth=""))
        assert (long.value, long.status) == (None, RewardStatus.ERROR)
        fits = await model.score(RewardItem(prompt="a" * 16, response="b" * 16, ground_truth=""))
        assert isinstance(fits.value, float)


async def test_a_model_that_cannot_score_does_not_start(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path / "nothing"), "nothing"),
        (_save(tmp_path / "two", labels=2), "2 logits"),
        (_save(tmp_path / "pads", labels=1, unk_token="</s>"), "padding"),
    ):
        app = create_app(RewardSettings(reward_fn="reward_model", reward_model=name))
        async with app.router.lifespan_context(app):
            with pytest.raises(ConfigurationError, match=message):
                await wait_ready(app)


async def test_a_failing_forward_pass_is_unscorable(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    from services.reward_server.reward_model import RewardModel

    scorer = RewardModel(model)
    answer = RewardItem(prompt="a", response="b", ground_truth="")
    async with scorer.serving():
        for error in (RuntimeError("out of memory"), IndexError("index out of range")):
            with monkeypatch.context() as patch:
                patch.setattr(scorer, "_forward", Mock(side_effect=error))
                failed = await scorer.score(answer)
            assert (failed.value, failed.status) == (None, RewardStatus.ERROR)
            assert str(error) in (failed.reason or "")
        assert isinstance((await scorer.score(answer)).value, float)
