"""Faults of other systems, injected into this one: patches of the product's code, within which a whole job runs.

Each exhibit says where the fault was seen, and which rule must name it after how many steps, or that the run is refused
or ended by another check. ``docs/guides/diagnosing.md`` is their table in words.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from services.data_server import batches, dataset_rows
from services.embedded_engine import engine, loading, model, requests, sampling, scheduler
from services.engines import engine as engines
from services.protocol.prompts import Cursor, Split
from services.protocol.rewards import FinishReason
from services.reward_server.scoring import Scorer
from tests.museum.healthy import AGENT, FLOAT, PUBLISHED_SHORT, SHORT
from trainer.algorithm import attention_layout
from trainer.config.objective import Objective
from trainer.model import learner, optimizer, policy

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Exhibit:
    """A fault: where it was seen, its patch, the settings of its run, and what must name it, at the latest when."""

    seen: str
    patch: Patch
    rule: str
    """The rule that must find it; empty where the run must be refused, or ended by a check."""
    within: int = 5
    settings: dict[str, str] = field(default_factory=lambda: FLOAT)
    steps: int = 8


def around(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function by ``change``, which gets the original before the arguments."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, functools.wraps(original)(lambda *a, **k: change(original, *a, **k)))


# --- weights that engines do not have ---


def stale(since: int = 1, node: int | None = None, lag: bool = False) -> AbstractContextManager[Any]:
    """Engines say that they serve the new version, and compute with old weights."""
    seen: list[Any] = []
    before: dict[int, Any] = {}

    def change(original: Any, self: Any, weights: Any, version: str) -> Any:
        if self not in seen:
            seen.append(self)
        is_stale = int(version) >= since and (node is None or seen.index(self) == node)
        kept = before.get(id(self), self._scheduler.model.weights) if lag else self._scheduler.model.weights
        before[id(self)] = weights
        return original(self, kept if is_stale else weights, version)

    return around(engine.Engine, "change_weights", change)


def partly(select: Callable[[str], bool], damage: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Some tensors of a version keep their first values, or are damaged."""
    first: dict[str, torch.Tensor] = {}

    def change(original: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        tensors = original(*arguments)
        for name in filter(select, tensors):
            first.setdefault(name, tensors[name].clone())
            tensors[name] = first[name] if damage is None else damage(tensors[name])
        return tensors

    return around(loading, "read_directory", change)


def swapped() -> Any:
    """Gate and up projection of a layer are exchanged."""

    def change(original: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        tensors = original(*arguments)
        gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return tensors

    return around(loading, "read_directory", change)


def zero_row(tensor: torch.Tensor) -> torch.Tensor:
    """Lose the first row of a matrix."""
    tensor = tensor.clone()
    tensor[0] = 0
    return tensor


def lost_adapter() -> Any:
    """The adapter is listed, and not computed with."""
    return around(model, "adapted", lambda original, linear, _low_rank, x, rows: original(linear, None, x, rows))


def kept_caches() -> Any:
    """Keys and values outlive the weights that computed them."""
    return mock.patch.object(scheduler.Scheduler, "drop_caches", autospec=True, return_value=None)


# --- what engines sample and say ---


def raw_logprobs() -> Any:
    """Log-probabilities are those of temperature 1."""

    def change(original: Any, self: Any, logits: Any, positions: Any) -> Any:
        plain = torch.log_softmax(logits.float(), -1)
        tokens, _ = original(self, logits, positions)
        return tokens, plain.gather(1, tokens[:, None])[:, 0]

    return around(sampling.Sampler, "sample", change)


def cut_distribution() -> Any:
    """The engine samples from the two likeliest tokens, and reports uncut log-probabilities."""
    made = sampling.Sampling
    return mock.patch.object(
        requests, "Sampling", lambda key, temperature, *_: made(key, temperature, top_k=2 if temperature else -1)
    )


def one_seed() -> Any:
    """All completions of a prompt draw the same numbers."""
    return around(requests, "stream_key", lambda original, seed, _number: original(seed, 0))


def without_end() -> Any:
    """The end token is cut off before the trainer gets it."""

    def change(original: Any, record: dict[str, Any]) -> Any:
        whole = original(record)
        if whole.finish_reason is not FinishReason.STOP or whole.tokens < 2:
            return whole
        return whole.model_copy(update={name: values[:-1] for name, values in whole.per_token.items()})

    return around(engines, "_completion", change)


def padded() -> Any:
    """Sampled tokens are padding at times."""

    def change(original: Any, self: Any, logits: Any, positions: Any) -> Any:
        logits[:, 0] = logits.amax(-1) - 1.0
        return original(self, logits, positions)

    return around(sampling.Sampler, "sample", change)


# --- what the trainer computes ---


def bleeding() -> Any:
    """Packed sequences see each other."""
    layout = attention_layout.AttentionLayout
    of = layout.of.__func__  # type: ignore[attr-defined]
    return mock.patch.object(layout, "of", classmethod(lambda cls, ends: of(cls, torch.full_like(ends, len(ends)))))


def wrong_positions() -> Any:
    """The trainer predicts each token one place too early."""

    def change(original: Any, *arguments: Any) -> Iterator[Any]:
        for batch in original(*arguments):
            object.__setattr__(batch, "predict_rows", (batch.predict_rows - 1).clamp(min=0))
            yield batch

    return around(learner, "packed", change)


def other_rotary() -> Any:
    """The trainer's rotary frequencies are half the engine's."""

    def change(original: Any, *arguments: Any, **named: Any) -> Any:
        loaded = original(*arguments, **named)
        loaded.model.rotary_emb.inv_freq.mul_(0.5)
        return loaded

    return around(policy, "load_model", change)


def no_optimizer() -> Any:
    """Optimizer steps change nothing."""
    return around(
        optimizer.Training, "take_step", lambda original, self, d, rates, n=1: original(self, d, [0.0] * len(rates), n)
    )


def scaled_advantages(factor: float) -> Any:
    """Advantages have the wrong sign or size."""

    def change(original: Any, *arguments: Any, **named: Any) -> Any:
        groups = original(*arguments, **named)
        for group in groups:
            for place, s in enumerate(group.sequences):
                group.sequences[place] = s.model_copy(update={"advantages": factor * s.advantages})
        return groups

    return around(Objective, "with_advantages", change)


# --- rewards and data ---


def rotated_rewards() -> Any:
    """Rewards belong to the answer before."""

    async def change(original: Any, *arguments: Any, **named: Any) -> Any:
        results = await original(*arguments, **named)
        return [*results[1:], *results[:1]]

    return around(Scorer, "score", change)


def rewards_by(reward: Callable[[int, Any], float]) -> Any:
    """Rewards depend on the place in the request, or on the row."""

    async def change(original: Any, self: Any, items: Any, **named: Any) -> Any:
        results = await original(self, items, **named)
        return [
            result.model_copy(update={"reward": reward(place, item)})
            for place, (item, result) in enumerate(zip(items, results, strict=True))
        ]

    return around(Scorer, "score", change)


def nothing_read() -> Any:
    """The verifier looks for another form of answer."""

    async def change(original: Any, *arguments: Any, **named: Any) -> Any:
        results = await original(*arguments, **named)
        return [result.model_copy(update={"reward": 0.0, "extracted": None}) for result in results]

    return around(Scorer, "score", change)


def same_rows() -> Any:
    """The data-server begins each batch at the first row."""

    def change(original: Any, self: Any, split: Split, cursor: Cursor, size: int) -> Any:
        return original(self, split, cursor if split is Split.TEST else Cursor(), size)

    return around(batches.Batches, "batch", change)


def held_out_trained() -> Any:
    """Held-out rows stay among those of training."""
    return around(dataset_rows, "_hold_out", lambda original, rows, *rest: (rows, original(rows, *rest)[1]))


def none() -> AbstractContextManager[Any]:
    """The fault is in the settings."""
    return contextlib.nullcontext()


TOOLS = FLOAT | AGENT | {"AGENT": "tests.museum.agents:with_tool"}
ASYNC = FLOAT | {"MODE": "async"}
LORA = FLOAT | {"LORA_RANK": "4", "LEARNING_RATE": "3e-4"}
OWN = "tests.museum.rewards:"
UNEQUAL = "equal answers, unequal rewards"

WEIGHTS: dict[str, Exhibit] = {
    "stale weights": Exhibit("TRL #5312", stale, "mismatch"),
    "stale weights, bfloat16": Exhibit("TRL #5312", stale, "mismatch", 16, SHORT, 16),
    "stale from version 4 on": Exhibit("open-instruct #1627", functools.partial(stale, 4), "mismatch", 8),
    "one version behind": Exhibit("verl #5721", functools.partial(stale, lag=True), "mismatch", 6),
    "one layer kept": Exhibit("prime-rl #2714, TRL #5269", lambda: partly(lambda n: ".layers.2." in n), "mismatch", 6),
    "one engine of two stale": Exhibit(
        "vLLM #52689", functools.partial(stale, node=1), "mismatch", 6, FLOAT | {"engines": "2"}
    ),
    "adapter not computed with": Exhibit("TRL #2856", lost_adapter, "mismatch", 6, LORA),
    "caches outlive weights": Exhibit("verl #6523", kept_caches, "mismatch", 8, FLOAT | AGENT),
}
"""Engines that do not compute with the weights that they confirm: a proof of served weights may end the run first."""
if find_spec("services.engines.proof"):
    # These are there from the first publication on, so that a difference alone does not name them.
    WEIGHTS |= {
        "gate and up exchanged": Exhibit("SkyRL #1680, verl #7495", swapped, ""),
        "one row lost": Exhibit("vLLM #53537", lambda: partly(lambda n: "layers.1.mlp.up_proj" in n, zero_row), ""),
    }

EXHIBITS: dict[str, Exhibit] = WEIGHTS | {
    "rate below what bfloat16 shows": Exhibit(
        "ao #1124", none, "learning rate", 5, PUBLISHED_SHORT | {"LEARNING_RATE": "1e-12"}
    ),
    "log-probabilities before temperature": Exhibit(
        "TRL #4159, vime #64", raw_logprobs, "mismatch", 5, FLOAT | {"TEMPERATURE": "0.6"}
    ),
    "the same with a mask": Exhibit(
        "TRL #4163", raw_logprobs, "importance weights", 5,
        FLOAT | {"TEMPERATURE": "0.6", "IMPORTANCE_CORRECTION": "icepop", "IMPORTANCE_CAP": "1.05"},
    ),
    "distribution cut by top-k": Exhibit("vime #69", cut_distribution, "sampling", 12, steps=12),
    "end token not trained": Exhibit("reasoning-from-scratch #185", without_end, "end token", 3),
    "padding is sampled": Exhibit("RAGEN #59", padded, "special tokens", 3),
    "one seed for a group": Exhibit("UniRL #208", one_seed, "copies", 3),
    "cut off at one token": Exhibit("rLLM #575", none, "cut off", 3, FLOAT | {"MAX_NEW_TOKENS": "1"}),
    "cut off and masked": Exhibit(
        "Trinity-RFT #608", none, "cut off", 3, FLOAT | {"MAX_NEW_TOKENS": "1", "MASK_TRUNCATED": "true"}
    ),
    "packed samples see each other": Exhibit("ms-swift #9565, Automodel #2131", bleeding, "mismatch", 3),
    "predictions one place early": Exhibit("prime-rl #2786", wrong_positions, "mismatch", 3),
    "other rotary frequencies": Exhibit("open-instruct #1473", other_rotary, "mismatch", 3),
    "optimizer without parameters": Exhibit("torchforge #592", no_optimizer, "weights stand still", 3, PUBLISHED_SHORT),
    "advantages of the wrong sign": Exhibit("slime #1918", lambda: scaled_advantages(-1.0), "advantages", 3),
    "advantages near 0": Exhibit("ROLL #397", lambda: scaled_advantages(1e-6), "gradient", 3),
    "reward is not a number": Exhibit("UniRL #330", none, "", 1, FLOAT | {"REWARD_FN": f"{OWN}nothing"}),
    "adapter with the rate of a model": Exhibit(
        "the docs of LoRA", none, "adapter's learning rate", 3, LORA | {"LEARNING_RATE": "1e-6"}
    ),
    "failures swallowed as 0": Exhibit("NeMo-RL #4061", none, UNEQUAL, 5, FLOAT | {"REWARD_FN": f"{OWN}swallowing"}),
    "rewards of other answers": Exhibit("TRL #3098", rotated_rewards, UNEQUAL),
    "reward is noise": Exhibit("a control", none, UNEQUAL, 5, FLOAT | {"REWARD_FN": f"{OWN}noise"}),
    "reward is length": Exhibit("ROLL #303", none, "reward follows length", 5, FLOAT | {"REWARD_FN": f"{OWN}longer"}),
    "reward is the place": Exhibit("TRL #6533", lambda: rewards_by(lambda n, _: n % 2), "reward follows place"),
    "reward is the row": Exhibit(
        "awslabs #97", lambda: rewards_by(lambda _, row: int(row.ground_truth) % 2), "reward ignores answers", 6
    ),
    "verifier reads another form": Exhibit("awslabs #97", nothing_read, "answers unread", 3),
    "no tool ever fires": Exhibit("awslabs #97, benchflow #988", none, "tools unused", 5, TOOLS),
    "held-out questions are trained on": Exhibit(
        "Repo2RLEnv #69", held_out_trained, "held-out prompts", 8,
        FLOAT | {"DATASET": "{questions}", "DATASET_CONFIG": ""},
    ),
    "cursor stands still": Exhibit("NeMo-RL #3599, TRL #5911", same_rows, "prompts again", 3),
    "learning rate too large": Exhibit(
        "a control", none, "worse than before", 30,
        SHORT | {"LEARNING_RATE": "3e-3", "EVAL_EVERY": "6", "EVAL_PROMPTS": "20"}, 18,
    ),
}  # fmt: skip
