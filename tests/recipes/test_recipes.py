"""Recipes: each is launched as its file says, as a dry run, and takes a step with the tiny model on a few rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from transformers import Qwen2Config, Qwen3Config

from local_runner import spec
from recipes.reverse_text import likeness
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor, Prompt, Split
from services.reward_server.app import create_app
from services.reward_server.settings import RewardSettings
from tests.scripts.test_launch import launch
from tests.sequences import trained_sequence
from tests.skypilot_facts import ROOT
from tests.waiting import wait_until
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks

RECIPES = {file.stem: file for file in sorted((ROOT / "recipes").glob("*.env"))}

SHARED: dict[str, Any] = {"vocab_size": 151936, "num_hidden_layers": 28, "num_key_value_heads": 8}
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": Qwen2Config(
        **SHARED | {"num_key_value_heads": 2}, hidden_size=1536, intermediate_size=8960, num_attention_heads=12
    ),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": Qwen3Config(
        **SHARED, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, head_dim=128
    ),
}
"""The shapes of models that only the hub has."""


def command(file: Path) -> list[str]:
    """Return the arguments of the launch at a recipe's top."""
    line = next(line for line in file.read_text().splitlines() if line.startswith("#   grpo launch "))
    _, _, *arguments = shlex.split(line.removeprefix("#   "))
    assert arguments[arguments.index("--env-file") + 1] == str(file.relative_to(ROOT))
    return arguments


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The job group that each recipe's own command writes."""
    directory = tmp_path_factory.mktemp("launches")
    files = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("local_runner.skypilot.interpreter", lambda: None)
        for name, file in RECIPES.items():
            arguments, model = command(file), spec.env_file(file)["MODEL_NAME"]
            if model in SHAPES:
                SHAPES[model].save_pretrained(directory / f"{name}-model")
                arguments += ["--model", str(directory / f"{name}-model")]
            launch(directory / name, *arguments)
            [files[name]] = (directory / name).glob("jobgroup.yaml")
    return files


def test_a_launch_has_the_recipes_settings(launched: dict[str, Path]) -> None:
    assert len(RECIPES) >= 5
    for name, file in RECIPES.items():
        settings = spec.env_file(file)
        tasks = {task.name: task.environment for task in spec.load(launched[name]).tasks}
        for setting in ("BATCH_SIZE", "GROUP_SIZE", "LEARNING_RATE", "ADVANTAGE"):
            assert tasks["ppo-trainer"][setting] == settings[setting], name


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_with_the_tiny_model(name: str, tiny_model: Path, tmp_path: Path) -> None:
    recipe = spec.env_file(RECIPES[name])
    rows = tmp_path / "rows.jsonl"
    kinds = {
        "gsm8k": lambda n: {"question": f"What is {n} + 2?", "answer": f"It is the sum.\n#### {n + 2}"},
        "PrimeIntellect/Reverse-Text-RL": lambda n: {"prompt": f"{n} - 2 = {n - 2}"},
    }
    held_out = tmp_path / "held_out.jsonl"
    for file, numbers in ((rows, range(9)), (held_out, range(9, 18))):
        file.write_text("".join(json.dumps(kinds[recipe["DATASET"]](n)) + "\n" for n in numbers))
    small = {"DATASET": str(rows), "DATASET_TEST": str(held_out), "MODEL_NAME": str(tiny_model), "MAX_STEPS": "1"}
    settings = recipe | small | {"BATCH_SIZE": "4", "MAX_NEW_TOKENS": "8", "COMPUTE_TYPE": "float32"}
    lowered = {name.lower(): value for name, value in settings.items()}
    chosen = TrainerSettings.load(**lowered)
    prompts, _ = Batches.load(DataSettings.load(**lowered)).batch(Split.TRAIN, Cursor(), chosen.batch_size)
    truths = {prompt["ground_truth"] for prompt in prompts}
    assert truths <= ({str(n + 2) for n in range(9)} | {f"{n} - 2 = {n - 2}" for n in range(9)}), truths

    with TestClient(create_app(RewardSettings.load(reward_fn=recipe["REWARD_FN"], reward_workers=1))) as server:
        wait_until(lambda: server.get("/health").is_success, "the reward-server is up", every=0.05)

        def answer(prompt: dict[str, Any], place: int) -> TokenSequence:
            """Return a made-up completion, scored by the reward-server; half a point makes the group differ."""
            item = {"prompt": prompt["prompt"], "response": f"It is {place}.", "ground_truth": prompt["ground_truth"]}
            result = server.post("/reward", json=item).json()
            assert result["status"] == "scored", result
            ids = [3 + (place + n) % 5 for n in range(4)]
            return trained_sequence(ids, [-1.0] * len(ids), reward=result["reward"] + place % 2 / 2)

        groups = [
            Group(
                group_id=str(n),
                prompt=Prompt.model_validate(prompt),
                sequences=[answer(prompt, place) for place in range(chosen.group_size)],
            )
            for n, prompt in enumerate(prompts)
        ]
    with join_ranks() as ranks:
        learner = Learner(chosen, load_policy(chosen, ranks), ranks, total_steps=1)
        before = [p.detach().clone() for p in learner.policy.parameters() if p.requires_grad]
        objective = Objective(chosen)
        training = [objective.training_group(group) for group in groups]
        critic = CriticLearner(learner) if chosen.has_critic else None
        values = None if critic is None else critic.values(training)
        learner.update(objective.with_advantages(training, None, values), 0)
        after = [p.detach() for p in learner.policy.parameters() if p.requires_grad]
    assert any((a != b).any() for a, b in zip(before, after, strict=True))


def test_the_likeness_of_reversed_text() -> None:
    assert likeness("Here: <reversed_text> cba </reversed_text>", "abc") == 1.0
    assert likeness("cba", "abc") == 0.0
    assert 0 < likeness("<reversed_text>cbx</reversed_text>", "abc") < 1
