"""Makes SGLang's environment work with a torch for CPU.

Declares operators that modules look up when they are imported, and that raise when they are called: torchvision's,
which its build for CUDA cannot register, and those of SGLang's kernels for processors, which are not installed. Leaves
out pinned memory, which SGLang's LoRA layers ask for and which exists beside an accelerator only.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_POOLS = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
_UNARY = "(Tensor x) -> Tensor"
SIGNATURES = {
    "torchvision": {
        **dict.fromkeys(("nms", "qnms"), _BOXES),
        **dict.fromkeys((*_POOLS, *(f"_{name}_backward" for name in _POOLS)), _UNARY),
    },
    # Those of recurrent layers. SGLang asks of others whether they are there.
    "sgl_kernel": dict.fromkeys(
        (
            "fused_gdn_gating_cpu",
            "fused_qk_gemma_rmsnorm_cpu",
            "fused_qk_gemma_rmsnorm_with_gate_cpu",
            "fused_qkvzba_split_reshape_cat_contiguous_cpu",
            "fused_sigmoid_gating_delta_rule_update_cpu",
            "fused_sigmoid_mul_cpu",
        ),
        _UNARY,
    ),
}

# pip runs in this environment too, before torch is there.
if importlib.util.find_spec("torch") is not None and "pip" not in sys.orig_argv:
    import torch

    # Kept: the declarations go when the library objects do.
    declarations = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in SIGNATURES}
    for namespace, signatures in SIGNATURES.items():
        for operator, signature in signatures.items():
            declarations[namespace].define(operator + signature)

    def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def without_pin_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return without_pin_memory

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]

# Triton's interpreter, in which SGLang's kernels of convolutions run here, takes masks of booleans only.
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from triton.runtime.interpreter import InterpreterBuilder

    def _by_booleans(access: Callable[..., Any], place: int) -> Callable[..., Any]:
        @functools.wraps(access)
        def with_booleans(*args: Any) -> Any:
            args[place].data = args[place].data.astype(bool)
            return access(*args)

        return with_booleans

    InterpreterBuilder.create_masked_load = _by_booleans(InterpreterBuilder.create_masked_load, 2)
    InterpreterBuilder.create_masked_store = _by_booleans(InterpreterBuilder.create_masked_store, 3)
