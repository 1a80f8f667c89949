"""The kernels of attention are compiled to an H100's machine code, within its shared memory. They are not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer.tiny import random_groups
from trainer.algorithm.attention_layout import TreeMask
from trainer.algorithm.packing import pack
from trainer.model.attention import KERNEL_OPTIONS

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("heads", "key_heads", "dimension"), [(14, 2, 64), (32, 8, 128)], ids=["0.5B", "8B"])
def test_the_kernels_compile_forward_and_backward(
    heads: int, key_heads: int, dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    layout = pack(random_groups(0, n_groups=12, longest=20), TreeMask).layout
    length = len(layout.ends)
    assert length > 300, "several tiles, the last of them not full"
    mask = layout.each(torch.Tensor.cuda).prepared()
    query, key, value = (
        torch.zeros(1, n, length, dimension, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    )
    with config.patch(compile_threads=1):
        attention = torch.compile(flex_attention, dynamic=True)
        output = attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS)
        output.sum().backward()
    compiled = {path.name for path in (tmp_path / "triton").rglob("*.cubin")}
    assert any("flex_attention_backward" in name for name in compiled)
    assert any("tem_fused_flex_attention_0" in name for name in compiled)
