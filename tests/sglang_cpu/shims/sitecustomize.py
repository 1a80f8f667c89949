"""Makes SGLang's environment work with a torch for CPU.

Declares torchvision's operators, which its build for CUDA cannot register, and leaves out pinned memory, which SGLang's
LoRA layers ask for and which exists beside an accelerator only.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_POOLS = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
SIGNATURES = {
    **dict.fromkeys(("nms", "qnms"), _BOXES),
    **dict.fromkeys((*_POOLS, *(f"_{name}_backward" for name in _POOLS)), "(Tensor x) -> Tensor"),
}

# pip runs in this environment too, before torch is there.
if importlib.util.find_spec("torch") is not None and "pip" not in sys.orig_argv:
    import torch

    # Kept: the declarations go when the library object does.
    torchvision_declarations = torch.library.Library("torchvision", "DEF")
    for operator, signature in SIGNATURES.items():
        torchvision_declarations.define(operator + signature)

    def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def without_pin_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return without_pin_memory

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
