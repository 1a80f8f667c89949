"""The models to evaluate, given by hub name or directory, or as the training run that wrote them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.core.errors import ConfigurationError
from services.weights.adapter_files import is_adapter
from services.weights.policy_store import PolicyStore

CONFIG = "config.json"
_STEP = re.compile(r"(?:v|step[-_]?|checkpoint[-_]|global_step[-_]?)0*(\d+)")
_EDGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """A model, its name in reports, and its training step, by which it is placed on a curve."""

    name: str
    model: str
    step: int | None = None

    def fingerprint(self) -> str:
        """Return a digest of the weights: the same for a copy, another once the weights have changed.

        A model of the hub has its name as fingerprint.
        """
        directory = Path(self.model)
        if not directory.is_dir():
            return self.model
        digest = hashlib.sha256()
        for path in sorted([directory / CONFIG, *directory.glob("*.safetensors")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                # Training changes every tensor, so the two ends of a file identify it.
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
        return digest.hexdigest()[:16]


def resolve(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """Return the checkpoints that a command names, ordered by step if all have one.

    Raises:
        ConfigurationError: a directory is no model, or two checkpoints are the same.
    """
    found = [_checkpoint(model) for model in models]
    if run_dir is not None:
        found += _of_run(run_dir)
    if len({checkpoint.model for checkpoint in found}) < len(found):
        raise ConfigurationError(f"--model: a model is named twice in {[checkpoint.model for checkpoint in found]}")
    names = [checkpoint.name for checkpoint in found]
    if len(set(names)) < len(names):
        # runs/a/model and runs/b/model: the directories above tell them apart.
        found = [replace(checkpoint, name=_name(checkpoint.model, parts=3)) for checkpoint in found]
    if len({checkpoint.name for checkpoint in found}) < len(found):
        raise ConfigurationError(f"--model: give directories of different names, not {names}")
    if all(checkpoint.step is not None for checkpoint in found):
        found.sort(key=lambda checkpoint: checkpoint.step or 0)
    return found


def file_name(text: str) -> str:
    """Return ``text`` with every character that is unusual in file names replaced by a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    if path.is_dir():
        _check_is_model(path)
        return Checkpoint(_name(str(path)), str(path.resolve()), _step(path))
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1 or path.exists():
        raise ConfigurationError(
            f"--model {model!r} is not a directory, seen from {Path.cwd()}; give a Hugging Face name or the directory "
            f"of a model"
        )
    return Checkpoint(_name(model), model)


def _check_is_model(path: Path) -> None:
    if (path / CONFIG).is_file():
        return
    if (path / "manifest.json").is_file():
        raise ConfigurationError(
            f"--model {str(path)!r} is a checkpoint for resuming training, not a model; the run's models are "
            f"{path.parents[1]}/policy/v* and {path.parents[1]}/model"
        )
    if is_adapter(path):
        raise _adapter_refusal("--model", path)
    if (path / "metrics.jsonl").is_file():
        raise ConfigurationError(f"--model {str(path)!r} is the directory of a run; give it as --run {path}")
    raise ConfigurationError(f"--model {str(path)!r} has no {CONFIG}; give the directory of a Hugging Face model")


def _adapter_refusal(option: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{option}: {path} has LoRA adapters only; merge them by `python -m scripts.merge_adapter {path} DIR` "
        f"and give --model DIR"
    )


def _of_run(run_dir: Path) -> list[Checkpoint]:
    if not run_dir.is_dir():
        raise ConfigurationError(f"--run {str(run_dir)!r} is not a directory; give one such as runs/grpo-1")
    published = PolicyStore(run_dir / "policy").published()
    found = [
        Checkpoint(policy.path.name, str(policy.path.resolve()), policy.version)
        for policy in published
        if not is_adapter(policy.path)
    ]
    model = run_dir / "model"
    if (model / CONFIG).is_file():
        final = Checkpoint("model", str(model.resolve()), _step(model))
        # The last published policy is the trained model.
        if final.step is None or final.step not in {checkpoint.step for checkpoint in found}:
            found.append(final)
    if not found and published:
        raise _adapter_refusal("--run", published[-1].path)
    if not found:
        raise ConfigurationError(f"--run {str(run_dir)!r} has neither policy/v* nor model/; give a run's directory")
    return found


def _step(path: Path) -> int | None:
    """Return the step in the directory's name, or for a run's final model the run's number of steps."""
    path = path.resolve()
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    summary = path.parent / "summary.json"
    if path.name == "model" and summary.is_file():
        steps = json.loads(summary.read_text()).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def _name(model: str, parts: int = 1) -> str:
    path = Path(model).expanduser()
    return file_name("-".join((path.resolve() if path.is_dir() else path).parts[-parts:]).strip("/"))
