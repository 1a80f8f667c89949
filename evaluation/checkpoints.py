"""What is evaluated: models by hub name or directory, and the Hugging Face directories that a training run leaves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigurationError
from services.weights.policy_store import PolicyStore

CONFIG = "config.json"
_STEP = re.compile(r"(?:v|step[-_]?|checkpoint[-_]|global_step[-_]?)0*(\d+)")
_EDGE = 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """A model and what it is called in reports; ``step`` is its place on a curve."""

    name: str
    model: str
    step: int | None = None

    @property
    def directory(self) -> Path | None:
        """Where it is on this machine; None for a model of the hub."""
        path = Path(self.model)
        return path if path.is_dir() else None

    def fingerprint(self) -> str:
        """Tells one set of weights from another: the same for a copy, another once the weights have changed."""
        if self.directory is None:
            return self.model
        digest = hashlib.sha256()
        for path in sorted([self.directory / CONFIG, *self.directory.glob("*.safetensors")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE))
                # Training changes every tensor, so the ends of a file tell as much as all of it.
                file.seek(max(0, size - _EDGE))
                digest.update(file.read(_EDGE))
        return digest.hexdigest()[:16]


def resolve(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    """The checkpoints that a command names, by step where they have one.

    Raises:
        ConfigurationError: one is no model directory, or two are the same.
    """
    found = [_checkpoint(model) for model in models]
    if run_dir is not None:
        found += _of_run(run_dir)
    if len({checkpoint.model for checkpoint in found}) < len(found):
        raise ConfigurationError(f"--model: a model is named twice in {[checkpoint.model for checkpoint in found]}")
    names = [checkpoint.name for checkpoint in found]
    if len(set(names)) < len(names):
        # runs/a/model and runs/b/model: the directories above tell them apart.
        found = [Checkpoint(_slug(c.model, parts=3), c.model, c.step) for c in found]
    if len({checkpoint.name for checkpoint in found}) < len(found):
        raise ConfigurationError(f"--model: give directories of different names, not {names}")
    if all(checkpoint.step is not None for checkpoint in found):
        found.sort(key=lambda checkpoint: checkpoint.step or 0)
    return found


def _checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    if path.is_dir():
        return Checkpoint(_slug(str(path)), str(path.resolve()), _step(_checked(path)))
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1 or path.exists():
        raise ConfigurationError(
            f"--model {model!r} is not a directory, seen from {Path.cwd()}; give a Hugging Face name or the directory "
            f"of a model"
        )
    return Checkpoint(_slug(model), model)


def _checked(path: Path) -> Path:
    if (path / CONFIG).is_file():
        return path
    if (path / "manifest.json").is_file():
        raise ConfigurationError(
            f"--model {str(path)!r} is what training resumes from, not a model; the run's models are {path.parents[1]}/"
            f"policy/v* and {path.parents[1]}/model"
        )
    if (path / "metrics.jsonl").is_file():
        raise ConfigurationError(f"--model {str(path)!r} is the directory of a run; give it as --run {path}")
    raise ConfigurationError(f"--model {str(path)!r} has no {CONFIG}; give the directory of a Hugging Face model")


def _of_run(run_dir: Path) -> list[Checkpoint]:
    if not run_dir.is_dir():
        raise ConfigurationError(f"--run {str(run_dir)!r} is not a directory; give one such as runs/grpo-1")
    published = PolicyStore(run_dir / "policy").published()
    found = [Checkpoint(policy.path.name, str(policy.path.resolve()), policy.version) for policy in published]
    model = run_dir / "model"
    if (model / CONFIG).is_file():
        final = Checkpoint("model", str(model.resolve()), _step(model))
        # The last published policy is the trained model.
        if final.step is None or final.step not in {checkpoint.step for checkpoint in found}:
            found.append(final)
    if not found:
        raise ConfigurationError(f"--run {str(run_dir)!r} has neither policy/v* nor model/; give a run's directory")
    return found


def _step(path: Path) -> int | None:
    """The step of a model directory: in its name, or that of the finished run whose result it is."""
    path = path.resolve()
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    summary = path.parent / "summary.json"
    if path.name == "model" and summary.is_file():
        steps = json.loads(summary.read_text()).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def _slug(model: str, parts: int = 1) -> str:
    path = Path(model).expanduser().resolve() if Path(model).expanduser().is_dir() else Path(model)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(path.parts[-parts:]).strip("/"))
