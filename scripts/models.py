"""``grpo merge-adapter``: LoRA adapters merged into their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.weights.policy_store import CONFIG_FILE, is_adapter


def merge_adapter(
    adapter: Annotated[Path, typer.Argument(help="directory of the adapters, such as runs/grpo-1/policy/v000012")],
    directory: Annotated[Path, typer.Argument(help="directory to write the model to")],
) -> None:
    """Merge LoRA adapters into their model.

    The model is the one that ``adapter_config.json`` names, in float32, with its tokenizer.
    """
    if not is_adapter(adapter):
        raise typer.BadParameter(f"{adapter} has no {CONFIG_FILE}", param_hint="ADAPTER")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(name).save_pretrained(directory)
