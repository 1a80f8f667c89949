"""Loads LoRA adapters into SGLang's own models: ``sglang-python load_adapters.py RANK LAYER,... MODEL ADAPTER ...``.

Prints an object a pair: the adapted layers whose adapters SGLang does not compute with, or its error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from load_published import build, show_each
from safetensors import safe_open
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_normalized_target_modules

RANK, TARGETS = int(sys.argv[1]), set(sys.argv[2].split(","))


def left_out(directory: Path, adapter: Path) -> dict[str, list[str]]:
    """Return the layers of an adapter that are not in the memory from which SGLang computes."""
    options = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": TARGETS, "max_loras_per_batch": 2}
    model, config, args, load = build(directory, **options, lora_backend="torch_native")
    manager = LoRAManager(
        model,
        config.hf_config,
        2,
        load,
        torch.float32,
        args,
        "torch_native",
        RANK,
        get_normalized_target_modules(TARGETS),
    )
    reference = LoRARef(lora_name="policy", lora_path=str(adapter), pinned=False)
    if not (loaded := manager.load_lora_adapter(reference)).success:
        raise ValueError(loaded.error_message)
    manager.fetch_new_loras({None, reference.lora_id})
    pool = manager.memory_pool
    slot = pool.uid_to_buffer_id[reference.lora_id]
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as opened:
        layers = [name.removesuffix(".lora_A.weight") for name in opened.keys() if "lora_A" in name]  # noqa: SIM118

    def is_there(layer: str) -> bool:
        [target] = get_normalized_target_modules([layer.rpartition(".")[2]])
        number = re.search(r"layers\.(\d+)\.", layer)
        assert number is not None
        return bool(pool.A_buffer[target][int(number[1])][slot].any())

    return {"left_out": [layer for layer in layers if not is_there(layer)]}


if __name__ == "__main__":
    show_each(left_out, zip(sys.argv[3::2], sys.argv[4::2], strict=True))
