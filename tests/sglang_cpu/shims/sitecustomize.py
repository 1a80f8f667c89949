"""Declares torchvision's operators, which its build for CUDA cannot register with a torch for CPU, before it looks."""

import importlib.util
import sys

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
