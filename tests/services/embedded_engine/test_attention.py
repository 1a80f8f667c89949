"""A token's attention is the same to the bit, whether it is computed alone or with others, however long the rest is."""

from __future__ import annotations

import pytest
import torch

from services.embedded_engine.kv_cache import round_up
from services.embedded_engine.model import attend, attend_causally, causal_mask, joins_rows
from tests.tolerance import both_types

CPU = torch.device("cpu")
LENGTH = 450
# Llama 3's, Qwen2.5's and SmolLM2's heads among them; one query per head is the hardest.
SHAPES = [(9, 3, 64), (14, 2, 64), (8, 2, 128), (4, 4, 64), (4, 2, 8)]


@both_types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_alone_gets_what_it_gets_within_a_prompt(shape: tuple[int, int, int], compute_type: str) -> None:
    queries, kv_heads, head_dim = shape
    groups, dtype, scale = queries // kv_heads, getattr(torch, compute_type), head_dim**-0.5
    torch.manual_seed(0)
    query = torch.randn(LENGTH, queries, head_dim).to(dtype)
    keys, values = torch.randn(2, kv_heads, round_up(LENGTH), head_dim).to(dtype)
    joins = joins_rows(groups, head_dim, dtype, CPU)
    whole = attend_causally(query, keys, values, 0, scale, joins=joins)
    for start, stop in ((1, 2), (60, 75), (127, 129), (390, 450)):
        part = attend_causally(
            query[start:stop], keys[:, : round_up(stop)], values[:, : round_up(stop)], start, scale, joins=joins
        )
        assert torch.equal(part, whole[start:stop])
    for position in (0, 31, 32, 127, 128, 300, 449):
        alone = query[position].view(kv_heads, groups, head_dim)
        for length in (round_up(position + 1), round_up(LENGTH)):
            mask = causal_mask(torch.tensor([position]), length, dtype).expand(kv_heads, groups, -1)
            found = attend(alone, keys[:, :length], values[:, :length], mask, scale)
            assert torch.equal(found.flatten(0, 1), whole[position]), (position, length)


def test_attend_causally_is_the_causal_attention_of_torch() -> None:
    torch.manual_seed(0)
    query = torch.randn(LENGTH, 6, 16)
    keys, values = torch.randn(2, 2, round_up(LENGTH), 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), *(side[:, :LENGTH].repeat_interleave(3, 0) for side in (keys, values)), is_causal=True
    )
    for joins in (True, False):
        given = attend_causally(query, keys, values, 0, 16**-0.5, joins=joins)
        assert torch.allclose(given, wanted.transpose(0, 1), atol=1e-5)
