"""The model to evaluate, named by hub name or directory, or as the training run that wrote it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
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
    """A model, its name in reports, and its training step."""

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


def resolve(model: str | None, run_dir: Path | None) -> Checkpoint:
    """Return the checkpoint that a command names: a model, or else a run's last one.

    Raises:
        ConfigurationError: a directory is not a whole model, or a run has none.
    """
    if model is not None:
        return _checkpoint(model)
    assert run_dir is not None, "a command names a model or a run"
    return _of_run(run_dir.resolve())


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


def _of_run(run_dir: Path) -> Checkpoint:
    model = run_dir / "model"
    if (model / CONFIG).is_file():
        return Checkpoint("model", str(model), _step(model))
    published = PolicyStore(run_dir / "policy").published()
    if not published:
        raise ConfigurationError(f"{str(run_dir)!r} has neither policy/v* nor model/; give a run's directory")
    last = published[-1]
    if is_adapter(last.path):
        raise _adapter_refusal("run", last.path)
    return Checkpoint(last.path.name, str(last.path), last.version)


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
