"""The expectations of GPUs follow from counted operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.scaling import roofline
from benchmarks.scaling.__main__ import GPU_DOCS, run
from scripts.launch.models import CONFIGS
from trainer.preflight.shape import ModelShape

pytestmark = pytest.mark.leaving


@pytest.mark.parametrize("label", ["0.5B", "8B"])
def test_the_useful_operations_are_those_that_torch_counts(label: str) -> None:
    config = CONFIGS[label][1]
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": 2, "layer_types": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        ids = torch.zeros((1, 1024), dtype=torch.int64)
        mask = torch.zeros((1, 1, 1024, 1024), dtype=torch.bfloat16)
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    shape = ModelShape.of(config)
    # Eager attention computes the pairs above the diagonal, too.
    above = 3 * 2 * 2 * 1024 * 1024 / 2 * shape.heads * shape.head_size * shape.layers
    useful = roofline.useful_operations(shape, 1024, 1024)
    assert counter.get_total_flops() - above == pytest.approx(useful, rel=0.01)


@pytest.mark.parametrize("label", roofline.LABELS)
def test_the_counted_kernels_compute_at_least_what_is_useful(label: str) -> None:
    counted, shape = roofline.Counted.of(label), ModelShape.of(CONFIGS[label][1])
    kernels = [*(counted.forward + counted.backward) * shape.layers, *counted.head]
    computed = sum(kernel.times * kernel.operations for kernel in kernels)
    # Tiles on the diagonal, tiles that the backward kernel computes twice, and logits that are computed again.
    useful = roofline.useful_operations(shape, roofline.TOKENS, roofline.SEQUENCE)
    assert useful < computed < 1.3 * useful


@pytest.mark.parametrize(("card", "published"), [("H100", 0.46), ("A100-80GB", 0.58)])
def test_the_shares_give_what_other_trainers_reached_with_8b_and_no_recomputation(card: str, published: float) -> None:
    [gpu] = [gpu for gpu in roofline.GPUS if gpu.name == card]
    assert roofline.expected("8B", gpu, recomputes=False).utilisation(gpu) == pytest.approx(published, abs=0.01)


def test_attention_has_shares_of_its_own_forward_and_backward() -> None:
    h100 = roofline.GPUS[0]
    slower = replace(roofline.HOPPER, attention_forward=0.225), replace(roofline.HOPPER, attention_backward=0.16)
    before, *after = (
        roofline.expected("8B", h100, shares, recomputes=True).seconds for shares in (roofline.HOPPER, *slower)
    )
    more = [seconds - before for seconds in after]
    shape, counted = ModelShape.of(CONFIGS["8B"][1]), roofline.Counted.of("8B")
    for kernels, passes, share, extra in zip(
        (counted.forward, counted.backward), (2, 1), (0.45, 0.32), more, strict=True
    ):
        [operations] = [kernel.operations for kernel in kernels if kernel.kind == "attention"]
        assert extra == pytest.approx(shape.layers * passes * operations / (share * h100.flops))


@pytest.mark.parametrize(("label", "least", "most"), [("0.5B", 0.3, 0.35), ("8B", 0.31, 0.46)])
def test_what_the_page_promises_on_an_h100_is_what_such_trainers_reach(label: str, least: float, most: float) -> None:
    h100 = roofline.GPUS[0]
    assert least < roofline.expected(label, h100).utilisation(h100) < most
    assert roofline.expected(label, h100, roofline.BOUND).utilisation(h100) < 1


def test_the_document_shows_what_the_command_prints() -> None:
    shown = f"```console\n$ python -m benchmarks.scaling roofline\n{run(['roofline'])}\n```"
    assert shown in GPU_DOCS.read_text(), "run `python -m benchmarks.scaling docs`"
