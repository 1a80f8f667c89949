"""Tiny configurations of the families of docs/models.md, as the tests of layers and layouts have them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.trainer.model import test_recurrent, test_rows, test_tree_families
from tests.trainer.tiny import SHAPE
from toys.arithmetic import build_tokenizer
from trainer.model.families import FAMILIES

KINDS = sorted({family.kind for family in FAMILIES})
TINY: dict[str, dict[str, Any]] = {
    kind: (test_rows.OTHERS | dict(test_tree_families.FAMILIES.values()) | test_recurrent.FAMILIES)[kind]
    for kind in KINDS
}
"""The options of each ``model_type``, besides the sizes that all have."""
for _kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
    TINY[_kind] = TINY[_kind] | {"full_attention_interval": 2}
TINY["gemma4_text"] = TINY["gemma4_text"] | {"vocab_size_per_layer_input": 17, "hidden_size_per_layer_input": 8}

_TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_DEPTHS = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": []}
IMAGES = {
    "qwen3_5": (TINY["qwen3_5_text"], _TOWER | _DEPTHS),
    "gemma3": (TINY["gemma3_text"], _TOWER | {"image_size": 32, "patch_size": 8, "vision_use_head": False}),
    "gemma4": (TINY["gemma4_text"], _TOWER),
}
"""Text and vision tower of image checkpoints."""


def save_image_model(directory: Path, kind: str) -> Path:
    """Write a tiny image checkpoint, with the names that its family has on the hub, and its tokenizer."""
    text, vision = IMAGES[kind]
    config = AutoConfig.for_model(kind, text_config=SHAPE | text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    if kind == "gemma3":
        tensors = load_file(directory / "model.safetensors")
        names = {name: re.sub("^vision_tower", r"\g<0>.vision_model", name) for name in tensors}
        save_file({names[name]: x for name, x in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory
