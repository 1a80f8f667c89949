"""The models to evaluate, named by hub name or directory, or as the training run that wrote them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.core.errors import ConfigurationError
from services.weights.policy_store import PolicyStore, is_adapter

CONFIG = "config.json"
_STEP = re.compile(r"(?:v|step[-_]?|checkpoint[-_]|global_step[-_]?)0*(\d+)")
_EDGE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 12
_PIECE_APART = 1 << 18
"""Bytes from piece to piece of a file, less than a matrix has."""


@dataclass(frozen=True)
class Checkpoint:
    """A model, its name in reports, and its training step, its place among several."""

    name: str
    model: str
    step: int | None = None

    @property
    def is_here(self) -> bool:
        """Return whether the model is a directory of this machine."""
        return Path(self.model).is_dir()

    @property
    def long_name(self) -> str:
        """The name with the directories above it where every run has one of that name, such as runs/X/model."""
        path = Path(self.model)
        is_common = path.is_absolute() and (path.name == "model" or _STEP.fullmatch(path.name))
        return _name(self.model, parts=3) if is_common else self.name

    def fingerprint(self) -> str:
        """Return a digest of the weights: the same for a copy, another once the weights have changed.

        A model of the hub has its name as fingerprint.
        """
        directory = Path(self.model)
        if not self.is_here:
            return self.model
        digest = hashlib.sha256()
        for path in sorted([directory / CONFIG, *directory.glob("*.safetensors"), *directory.glob("*.bin")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                # Training may change some tensors alone, such as adapters that are merged.
                for start in range(0, size, _PIECE_APART):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
        return digest.hexdigest()[:16]


def resolve(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """Return the checkpoints that a command names, ordered by step if all have one.

    Raises:
        ConfigurationError: a directory is not a whole model, or a run has none.
    """
    resolved = [_checkpoint(model) for model in models]
    if run_dir is not None:
        resolved += _of_run(run_dir)
    if len({checkpoint.name for checkpoint in resolved}) < len(resolved):
        # runs/a/model and runs/b/model: the directories above tell them apart.
        resolved = [replace(checkpoint, name=_name(checkpoint.model, parts=3)) for checkpoint in resolved]
    if all(checkpoint.step is not None for checkpoint in resolved):
        resolved.sort(key=lambda checkpoint: checkpoint.step or 0)
    return resolved


def file_name(text: str) -> str:
    """Return ``text`` with every character that is unusual in file names replaced by a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser().resolve()
    if not path.is_dir():
        return Checkpoint(_name(model), model)
    if is_adapter(path):
        raise _adapter_refusal("--model", path)
    if not (path / CONFIG).is_file():
        raise ConfigurationError(f"--model {model!r} has no {CONFIG}; a run is given without --model")
    return Checkpoint(_name(str(path)), str(path), _step(path))


def _adapter_refusal(option: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{option}: {path} has LoRA adapters only; merge them by `grpo merge-adapter {path} DIR` and give --model DIR"
    )


def _of_run(run_dir: Path) -> list[Checkpoint]:
    run_dir = run_dir.resolve()
    published = PolicyStore(run_dir / "policy").published()
    resolved = [
        Checkpoint(policy.path.name, str(policy.path), policy.version)
        for policy in published
        if not is_adapter(policy.path)
    ]
    model = run_dir / "model"
    if (model / CONFIG).is_file():
        final = Checkpoint("model", str(model), _step(model))
        # The last published policy is the trained model.
        if final.step is None or final.step not in {checkpoint.step for checkpoint in resolved}:
            resolved.append(final)
    if not resolved and published and is_adapter(published[-1].path):
        raise _adapter_refusal("run", published[-1].path)
    if not resolved:
        raise ConfigurationError(f"{str(run_dir)!r} has neither policy/v* nor model/; give a run's directory")
    return resolved


def _step(path: Path) -> int | None:
    """Return the step in the name of an absolute path, or for a run's final model the run's number of steps."""
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    summary = path.parent / "summary.json"
    if path.name == "model" and summary.is_file():
        steps = json.loads(summary.read_text("utf-8")).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def _name(model: str, parts: int = 1) -> str:
    return file_name("-".join(Path(model).parts[-parts:]))
