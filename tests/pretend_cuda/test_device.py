"""The pretended device: torch believes in an H100 and takes its branches, without values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.pretend_cuda.seen import Seen

pytestmark = pytest.mark.cuda


def test_torch_sees_one_h100() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0)


def test_operations_forward_and_backward_are_those_of_cuda() -> None:
    with FakeTensorMode(), Seen() as seen:
        x = torch.empty(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda
    kernel = "aten._scaled_dot_product_cudnn_attention"
    assert {f"{kernel}.default", f"{kernel}_backward.default"} <= seen.names().keys()


def test_a_wait_for_a_value_raises() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(3, device="cuda").sum().item()
