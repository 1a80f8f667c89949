"""Model and adapter directories as transformers, PEFT and every engine load them, and other writes to the volume.

A full disk becomes one error, DiskFullError, with the path and the remedy.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.serialization._torch
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import replace_directory
from services.core.logs import get_logger
from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE
from trainer.config import TrainerSettings
from trainer.model.gathering import gather_state
from trainer.model.loading import untrained_files
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding

log = get_logger(__name__)

UNTRAINED = "untrained.safetensors"
"""The tensors of an image model that are not trained: a file of the run, and of every model that it saves."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors of a full device and of a full quota."""

PROBE_BYTES = 1 << 20


class DiskFullError(DependencyLostError):
    """A full disk below the run directory."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskFullError in place of an error within that means that the disk of ``path`` is full."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if isinstance(error, DiskFullError) or not _is_full(error, there):
            raise
        usage = shutil.disk_usage(there)
        raise DiskFullError(
            f"the disk is full: {path} cannot be written, {usage.free / 1e9:.3f} of {usage.total / 1e9:.3f} GB are "
            "free there. Make room on that volume, for example by removing old runs (grpo clean), or keep fewer "
            "checkpoints (CHECKPOINTS_KEPT); started again, the run continues from its newest checkpoint."
        ) from error


def write_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a hidden directory, which then takes the place of ``directory``, so that it is never partial.

    Raises:
        DiskFullError: the disk is full; nothing stays of the hidden directory.
    """
    hidden = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    with writing(directory):
        try:
            hidden.mkdir(parents=True)
            write(hidden)
            replace_directory(hidden, directory)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _is_full(error: BaseException, directory: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, CheckpointException):
        # torch's file writer drops the system's error, so try to write.
        return not _has_room(directory)
    return "No space left on device" in str(error)  # safetensors quotes the system's message


def _has_room(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno not in FULL
    return True


# huggingface_hub logs every file that it saves, under its own path as the logger's name.
logging.getLogger(huggingface_hub.serialization._torch.__file__).setLevel(logging.WARNING)


def save_pretrained(policy: Policy, ranks: Ranks, directory: Path, rounding: Rounding) -> None:
    """Write a model directory that ``AutoModelForCausalLM.from_pretrained`` and every engine load. A collective.

    Raises:
        DiskFullError: the disk is full; raised on every rank.
    """
    # No copy on a CPU: everything is written before the parameters change.
    state = gather_state(policy.full_parameters(rounding), ranks, copy=False)
    write = partial(write_model, policy, state, dtype=rounding.dtype)
    ranks.on_main(lambda: write_whole(directory, write), DiskFullError)


def keep_untrained(policy: Policy, settings: TrainerSettings) -> None:
    """Keep the untrained tensors of an image model in a file of the run. For rank 0, before anything is saved.

    Every model that the run saves links to it, so that it opens as the image model that it was.

    Raises:
        ConfigurationError: the checkpoint's files are not safetensors.
        DiskFullError: the disk is full.
    """
    assert policy.description is not None, "rank 0 has it"
    config, name = policy.description.config, settings.model_name
    if config.get_text_config() is config:
        return
    files = untrained_files(policy.causal_lm(), name)
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise ConfigurationError(
            f"MODEL_NAME: {name} is an image model whose vision tower cannot be kept, because its files are not "
            "safetensors; give a checkpoint that has them, or its language model alone"
        )
    kept: dict[str, Tensor] = {}
    for file, names in files.items():
        with safe_open(str(cached_file(name, file)), framework="pt") as opened:
            kept |= {tensor: opened.get_tensor(tensor) for tensor in names}
    path = settings.run_dir / UNTRAINED
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(kept, path, metadata={"format": "pt"})
    policy.description = replace(policy.description, untrained=path)
    log.info("the text of an image model is trained; the rest is kept as it is", tensors=len(kept), file=str(path))


def write_model(policy: Policy, state: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    """Write a model directory: weights, configuration, generation defaults and tokenizer. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, directory, metadata={"format": "pt"})
        _save_description(policy, directory, dtype)
        follow_umask(directory, "config.json")
        _add_untrained(policy, list(state), directory)


def write_adapter(policy: Policy, state: dict[str, Tensor], directory: Path) -> None:
    """Write a directory with the LoRA adapters, which PEFT and every engine load on top of MODEL_NAME. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(policy.adapter_config(), indent=2), "utf-8")
        follow_umask(directory, CONFIG_FILE)


def follow_umask(directory: Path, config_file: str) -> None:
    """Give the weights the mode of the file of their configuration: safetensors lets only their owner read them."""
    mode = stat.S_IMODE((directory / config_file).stat().st_mode)
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)


def _add_untrained(policy: Policy, trained: list[str], directory: Path) -> None:
    """Link the run's file of untrained tensors into a model directory, and list them in its index."""
    assert policy.description is not None, "only rank 0 saves"
    source = policy.description.untrained
    if source is None:
        return
    try:
        (directory / UNTRAINED).hardlink_to(source)
    except OSError:  # Another file system, or one without links.
        shutil.copy(source, directory)
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        content: dict[str, Any] = json.loads(index.read_text("utf-8"))
    else:
        # Readers take a file of the usual name for the whole model.
        (directory / SAFE_WEIGHTS_NAME).rename(directory / "trained.safetensors")
        content = {"metadata": {}, "weight_map": dict.fromkeys(trained, "trained.safetensors")}
    with safe_open(source, framework="pt") as opened:
        content["weight_map"] |= dict.fromkeys(opened.keys(), UNTRAINED)
    index.write_text(json.dumps(content), "utf-8")


def _save_description(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    assert policy.description is not None, "only rank 0 saves, and only the policy in training"
    config, names = policy.description.config, policy.description.config_file
    if policy.description.untrained is None:
        config, names = config.get_text_config(), names.get("text_config", names)
        names = names | {"architectures": [type(policy.causal_lm()).__name__], "model_type": config.model_type}
    config.save_pretrained(directory)
    # By the checkpoint's own names, because engines do not read all that transformers writes. SGLang takes a default
    # for the base of OLMo 3's rotary embeddings, and cannot open a Qwen3-Next without full_attention_interval.
    content = {name: x for name, x in names.items() if name != "torch_dtype"} | {"dtype": str(dtype).split(".")[1]}
    (directory / "config.json").write_text(json.dumps(content, indent=2), "utf-8")
    generation = getattr(policy.causal_lm(), "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    policy.description.tokenizer.save_pretrained(directory)
