"""An optimizer step on the pretended device, from packing to the optimizer: nothing waits or adds up in series."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.pretend_cuda.learner import pretended_learner, pretended_ranks
from tests.pretend_cuda.seen import Call, Seen
from tests.sequences import trained_sequence
from tests.trainer.tiny import random_groups, with_heads_of
from tests.waiting import LIMIT_SECONDS
from trainer.algorithm.attention_layout import TILE, TreeMask
from trainer.algorithm.loss import StepSize
from trainer.algorithm.packing import Context, MicroBatch, TrainingGroup, pack
from trainer.checkpoints import checkpoint
from trainer.model import attention, micro_batching
from trainer.model.policy import load_policy

pytestmark = pytest.mark.cuda

GROUPS = [replace(g, is_replayed=i % 3 == 0) for i, g in enumerate(random_groups(1, n_groups=20, longest=12))]
MICRO_BATCHES = 3


@dataclass(frozen=True)
class Case:
    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    passes: int = MICRO_BATCHES
    """Forward passes."""
    has_frozen_embedding: bool = False
    graphs: int = 2
    """Compiled graphs: for micro-batches of several tiles, and of a single tile."""


CASES = {
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"activation_checkpointing": True, "loss": "dppo_kl", "off_policy_max_kl": 0.1}),
    "shared critic": Case("llama", {"advantage": "gae", "critic": "shared", "importance_correction": "sequence"}),
    # The reference is the model without its adapters.
    "adapters": Case("qwen3", {"lora_rank": 4, "kl_coef": 0.1}, 2 * MICRO_BATCHES, True, 4),
    # One of its two layers is dense.
    "mixture": Case("qwen3_moe", graphs=4),
}


@dataclass(frozen=True)
class Step:
    case: Case
    seen: Seen
    """The operations up to the first wait for a value."""


@pytest.fixture(scope="module", params=CASES)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """An optimizer step up to the first wait for a value, which must be that of its metrics."""
    case = CASES[request.param]
    counters.clear()
    directory = tmp_path_factory.mktemp("model")
    with (
        pretended_learner(directory, with_heads_of(16, case.family), **case.settings) as learner,
        Seen() as seen,
        pytest.raises(DataDependentOutputException) as wait,
    ):
        learner.update(GROUPS, 0)
    assert "metrics" in [entry.name for entry in wait.traceback], wait.getrepr()
    return Step(case, seen)


def test_the_host_waits_for_nothing_before_the_optimizer_has_stepped(step: Step) -> None:
    names = step.seen.names()
    assert names["aten.embedding.default"] == step.case.passes
    assert "aten._fused_adamw_.default" in names


def test_attention_is_one_kernel_a_layer_over_the_trees(step: Step) -> None:
    names = step.seen.names()
    assert names["flex_attention_backward"] == 2 * MICRO_BATCHES
    assert not any("scaled_dot_product" in name for name in names)


def test_no_gradient_is_added_up_row_by_row(step: Step) -> None:
    names = step.seen.names()
    assert not any("index_put" in name for name in names)
    embeddings = 0 if step.case.has_frozen_embedding else MICRO_BATCHES
    assert names["aten.embedding_dense_backward.default"] == embeddings, "that of the tokens' embedding only"


def test_copies_to_the_device_do_not_wait(step: Step) -> None:
    copies = [call for call in step.seen.calls if is_copy_to_the_device(call)]
    assert len(copies) > 10 * MICRO_BATCHES
    assert all(call.options.get("non_blocking") for call in copies)


def is_copy_to_the_device(call: Call) -> bool:
    return (
        call.name == "aten._to_copy.default"
        and call.args[0].device.type == "cpu"
        and torch.device(call.options.get("device") or "cpu").type == "cuda"
    )


def test_layers_are_traced_whole_and_layers_of_a_kind_share_a_graph(step: Step) -> None:
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= step.case.graphs


def test_the_experts_of_a_mixture_are_products_by_group(step: Step) -> None:
    n_mixtures = step.case.family.count("moe")
    # Each of the two products has two products in the backward pass.
    assert step.seen.names()["aten._grouped_mm.default"] == n_mixtures * MICRO_BATCHES * 2 * 3


def test_a_long_prompt_is_computed_once_for_all_its_completions_and_no_key_is_copied(tmp_path: Path) -> None:
    answers = [trained_sequence([token] * 10, [-1.0] * 10, [0.1] * 10) for token in range(3, 11)]
    group = TrainingGroup([2] * 100, answers)
    with pretended_learner(tmp_path, with_heads_of(16, "qwen2")) as learner, Seen() as seen:
        with pytest.raises(DataDependentOutputException):
            learner.update([group], 0)
        (on_a_cpu,) = micro_batching.share_out([group], 1, learner.settings.micro_batch_tokens)
    assert len(on_a_cpu) > 1, "there its keys are too many"
    assert seen.names()["aten.embedding.default"] == 1
    calls = [call for call in seen.calls if call.name == "flex_attention"]
    assert calls
    assert all(call.args[0].shape[2] == call.args[1].shape[2] == 2 * TILE for call in calls), "queries and keys"


def test_an_optimizer_that_was_saved_before_its_first_step_counts_steps_on_the_device(tmp_path: Path) -> None:
    with pretended_learner(tmp_path, with_heads_of(16, "qwen2")) as learner:
        checkpoint._begin(learner.optimizer)
        states = list(learner.optimizer.state.values())
        assert {state[name].device.type for state in states for name in ("step", "exp_avg", "exp_avg_sq")} == {"cuda"}


def test_the_next_micro_batch_is_packed_into_pinned_memory_while_the_device_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second, threads = threading.Event(), set()

    def watched(pieces: Sequence[TrainingGroup], order: Any, context: Context) -> MicroBatch:
        assert order is TreeMask
        threads.add(threading.current_thread())
        if pieces == [GROUPS[1]]:
            second.set()
        return pack(pieces, order, context)

    pinned = []
    monkeypatch.setattr(micro_batching, "pack", watched)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    with pretended_ranks() as ranks:
        batches = micro_batching.packed([[GROUPS[0]], [GROUPS[1]]], ranks)
        batch = next(batches)
        assert second.wait(LIMIT_SECONDS), "the second is packed though nobody has asked for it"
        assert batch.input_ids.is_cuda
        assert len(list(batches)) == 1
    assert threading.current_thread() not in threads
    assert len(pinned) > 2 * 10


RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "all weights and a reference": ("qwen2", {"kl_coef": 0.1}, 3),
    "adapters and a reference": ("qwen3", {"lora_rank": 4, "kl_coef": 0.1}, 4),
    "a mixture with a dense layer": ("qwen3_moe", {}, 4),
}
"""Family, settings, and the number of graphs at most."""


@pytest.mark.parametrize("name", RUNS)
def test_rows_of_any_length_share_graphs_and_attention_is_always_one_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings, most = RUNS[name]
    counters.clear()
    torch._dynamo.reset()
    uncompiled: list[int] = []
    kernel = attention.flex_attention

    def watched(query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            uncompiled.append(query.shape[2])
        return kernel(query, *arguments, **options)

    monkeypatch.setattr(attention, "flex_attention", watched)
    # No work on a rank, one tile, several; whole tiles and tiles in part. Packed outside of FakeTensorMode.
    rows = [pack(random_groups(1, n_groups=n, longest=12) if n else [], TreeMask) for n in (0, 1, 5, 25)]
    with pretended_learner(tmp_path, with_heads_of(16, family), **settings) as learner:
        models = [learner.policy]
        if settings.get("kl_coef") and not settings.get("lora_rank"):
            models.append(load_policy(learner.settings, learner.ranks, trainable=False))
        for batch in (row.to(learner.ranks.device) for row in rows):
            with torch.no_grad():
                for model in models:
                    model(batch)
                with learner.policy.without_adapters():
                    learner.policy(batch)
            with suppress(DataDependentOutputException):
                learner._backward(iter([batch]), StepSize(10, 10), [None], 0)
    assert uncompiled == []
    assert counters["stats"]["unique_graphs"] <= most
