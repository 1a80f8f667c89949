"""The kernels of attention are compiled to an H100's machine code, within its shared memory. They are not run."""

from __future__ import annotations

import pytest
import torch

from services.core.errors import ConfigurationError
from tests.pretend_cuda.machine_code import compiled, pairs_of_step
from trainer.model.attention import KERNELS, choose_kernel, kernel_options

pytestmark = pytest.mark.cuda

MOST = {64: ((15, 10), (42, 22)), 128: ((16, 11), (47, 27))}
"""By the width of heads, a thread's instructions for a pair in tiles with a mask and in whole ones, forward and
backward. With torch's own options: 23, 12, 56 and 36 for heads of 64; 27, 17, 63 and 41 for heads of 128."""


@pytest.mark.parametrize("width", MOST)
def test_a_pair_takes_few_instructions_and_a_forward_pass_spills_nothing(width: int) -> None:
    choose_kernel("triton")
    options = kernel_options(width, torch.bfloat16)
    kernels = compiled(width, options)
    assert [kernel.is_backward for kernel in kernels] == [False, True]
    assert (kernels[0].spills, kernels[0].resident_warps) == (0, 8)
    for kernel, most in zip(kernels, MOST[width], strict=True):
        assert all(n < m for n, m in zip(kernel.instructions(pairs_of_step(kernel, options, width)), most, strict=True))


def test_only_heads_that_were_counted_get_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_kernel("triton")
    assert kernel_options(64, torch.bfloat16)["fwd_num_warps"] == 8
    assert kernel_options(64, torch.float32) == kernel_options(80, torch.bfloat16) == KERNELS["triton"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    choose_kernel("triton")
    assert kernel_options(64, torch.bfloat16) == KERNELS["triton"]


@pytest.mark.parametrize(("is_installed", "capability"), [(False, (9, 0)), (True, (8, 9))])
def test_a_kernel_that_cannot_run_here_is_refused(
    is_installed: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.model.attention.find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ConfigurationError, match="ATTENTION_KERNEL=flash"):
        choose_kernel("flash")
