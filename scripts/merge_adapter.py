"""``grpo merge-adapter``: published LoRA adapters, merged into their model in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.weights.policy_store import CONFIG_FILE, is_adapter


def merge(adapter: Path, directory: Path) -> None:
    """Write the model that ``adapter_config.json`` names with the adapters added to its weights, and its tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(name).save_pretrained(directory)


def main(
    adapter: Annotated[Path, typer.Argument(help="directory of the adapters, such as runs/grpo-1/policy/v000012")],
    directory: Annotated[Path, typer.Argument(help="directory to write the model to")],
) -> None:
    """Merge LoRA adapters into their model."""
    if not is_adapter(adapter):
        raise typer.BadParameter(f"{adapter} has no {CONFIG_FILE}", param_hint="ADAPTER")
    merge(adapter, directory)
