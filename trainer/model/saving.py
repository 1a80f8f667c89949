"""Model and adapter directories as transformers, PEFT and every engine load them, and other writes to the volume.

A full disk becomes one error, DiskFullError, with the path and the remedy.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import huggingface_hub.serialization._torch
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from services.core.errors import DependencyLostError
from services.core.files import replace_directory
from services.weights.policy_store import CONFIG_FILE, WEIGHTS_FILE
from trainer.model.gathering import gather_state
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding

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


def _save_description(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    assert policy.description is not None, "only rank 0 saves, and only the policy in training"
    config = copy.deepcopy(policy.description.config)
    config.dtype = dtype
    config.architectures = [type(policy.causal_lm()).__name__]
    config.save_pretrained(directory)
    generation = getattr(policy.causal_lm(), "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    policy.description.tokenizer.save_pretrained(directory)
