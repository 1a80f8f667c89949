"""Tasks that train in seconds or minutes on a processor, as settings for a run in this process or for a job group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.job import DEMO
from benchmarks.results.parity import PARITY_TOKENS, parity
from benchmarks.results.runs import Settings

Reward = Callable[[str, str, str], float]
"""The reward of a prompt, a completion and the ground truth, as text."""

DEMO_TASK = DEMO | {
    "COMPUTE_TYPE": "float32",
    "NUM_EPOCHS": "1000",
    "MIN_WORKERS": "1",
    "KEEP_MEMORY": "true",
    "EVAL_SAMPLES": "4",
}
"""SmolLM2-135M, with the settings of examples/demo.env: it learns to answer an addition by the number alone."""

TINY = {
    "DATASET": "arithmetic",
    "DATASET_CONFIG": '{"digits": [1, 2], "operations": "+-", "template": "{a}{op}{b}="}',
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "benchmarks.results.parity:parity",
    "ROLLOUT_ENGINE": "embedded",
    "CUDA_VISIBLE_DEVICES": "",
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": str(PARITY_TOKENS),
    "TEMPERATURE": "1",
    "LEARNING_RATE": "5e-4",
    "MAX_STEPS": "40",
    "NUM_EPOCHS": "1000",
    "CHECKPOINT_EVERY": "0",
    "COMPUTE_TYPE": "float32",
    "ENGINE_DTYPE": "float32",
    "PUBLISH_TYPE": "float32",
    "KEEP_MEMORY": "true",
    "MIN_WORKERS": "1",
    "EVAL_PROMPTS": "200",
    "EVAL_SAMPLES": "4",
}
"""A model of 0.4M random weights learns to answer sums with eight even digits and differences with eight odd ones.

A step is 64 completions. No MODEL_NAME: the run makes the model, always the same.
"""


def exact_match(_prompt: str, response: str, ground_truth: str) -> float:
    """Return 1 if the response is the ground truth, else 0."""
    return float(response.strip() == ground_truth.strip())


REWARDS: dict[str, Reward] = {
    "benchmarks.results.parity:parity": lambda prompt, response, _truth: parity(prompt, response),
    "exact_match": exact_match,
}
"""The functions of REWARD_FN that runs in this process know."""


@contextmanager
def with_model(settings: Settings) -> Iterator[Settings]:
    """Give the settings with their MODEL_NAME; without one, a new directory has the tiny model with random weights."""
    if "MODEL_NAME" in settings:
        yield settings
        return
    from toys import arithmetic

    with TemporaryDirectory() as directory:
        arithmetic.build_model().save_pretrained(Path(directory))
        arithmetic.build_tokenizer().save_pretrained(directory)
        yield settings | {"MODEL_NAME": directory}
