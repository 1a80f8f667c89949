"""Checkpoints: everything that makes a resumed run the same run, written beside the training and renamed into place.

A checkpoint is a directory ``step-000025`` with the sharded model and optimizer (torch.distributed.checkpoint; any
number of ranks can read it), ``state.json`` with the rest, and ``manifest.json`` with size and checksum of every
file. It is written under a hidden name and renamed, so a directory with a plain name is complete; one that was
damaged since is recognised by its manifest, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from services.errors import ConfigurationError
from services.logs import get_logger
from services.protocol import Cursor
from trainer.distributed import Ranks
from trainer.policy import Policy

log = get_logger(__name__)

HASH_BLOCK_BYTES = 1 << 22


class RunState(BaseModel):
    """What a run is beside its weights and optimizer."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Completed steps."""
    policy_version: int = 0
    """The version that the policy is published as after them."""
    model_type: str
    parameters: int
    cursor: Cursor
    replay_snapshot: str | None = None
    rewards: list[float] = []
    """Mean reward of each completed step."""
    accuracy_before: float | None = None
    best_accuracy: float | None = None
    best_step: int | None = None
    """The step of the best accuracy; its checkpoint is kept."""
    last_accuracy: float | None = None
    evaluated_step: int | None = None
    seconds: float = 0.0
    random_state: list[int] = []
    """torch's CPU generator state, bytes."""


@dataclass
class _Pending:
    future: Future[Any]
    hidden: Path
    final: Path
    state: RunState


class CheckpointStore:
    """The checkpoints of a run. Saving and loading are collectives of all ranks."""

    def __init__(self, directory: Path, kept: int, ranks: Ranks) -> None:
        self.directory = directory
        self.kept = kept
        self.ranks = ranks
        self._pending: _Pending | None = None
        # Its collectives run in a thread beside the training's, so it has a process group of its own.
        self._group = dist.new_group(backend="gloo")
        if ranks.is_main:
            directory.mkdir(parents=True, exist_ok=True)

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, state: RunState, *, wait: bool = False) -> None:
        """Starts to write a checkpoint; the copy is made before this returns, the writing goes on beside the training.

        Args:
            policy: the model.
            optimizer: its optimizer.
            state: the rest.
            wait: return only when it is in place.
        """
        self.finish()
        hidden = self.directory / f".step-{state.step:06d}.partial"
        if self.ranks.is_main:
            shutil.rmtree(hidden, ignore_errors=True)
        self.ranks.barrier()
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        future = async_save(
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=hidden, process_group=self._group
        )
        self._pending = _Pending(cast("Future[Any]", future), hidden, self._path(state.step), state)
        if wait:
            self.finish()

    def poll(self) -> RunState | None:
        """Puts a finished checkpoint in place; returns its state once, on every rank. A collective, and never waits."""
        pending = self._pending
        if pending is None or self.ranks.any(not pending.future.done()):
            return None
        return self.finish()

    def finish(self) -> RunState | None:
        """Waits until a checkpoint that is being written is in place; returns its state."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.future.result()
        self.ranks.barrier()
        if self.ranks.is_main:
            (pending.hidden / "state.json").write_bytes(orjson.dumps(pending.state.model_dump(mode="json")))
            _write_manifest(pending.hidden)
            shutil.rmtree(pending.final, ignore_errors=True)
            pending.hidden.rename(pending.final)
            best = None if pending.state.best_step is None else self._path(pending.state.best_step)
            for old in self._complete()[: -self.kept]:
                if old != best:
                    shutil.rmtree(old)
        self.ranks.barrier()
        return pending.state

    def newest(self, model_type: str, parameters: int) -> tuple[Path, RunState] | None:
        """The newest undamaged checkpoint of this model, the same on every rank; None where there is none.

        Raises:
            ConfigurationError: there are checkpoints, and all are of another model or damaged.
        """
        found: list[Any] = [None, ""]
        if self.ranks.is_main:
            found = list(self._newest(model_type, parameters))
        path, complaint = self.ranks.broadcast_json(found)
        if path is None:
            if complaint:
                raise ConfigurationError(complaint)
            return None
        return Path(path), RunState.model_validate_json((Path(path) / "state.json").read_bytes())

    def load(self, path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Reads model and optimizer of a checkpoint, sharded as this run is."""
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        load(state, checkpoint_id=path)
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _complete(self) -> list[Path]:
        return sorted(self.directory.glob("step-[0-9]*"))

    def _newest(self, model_type: str, parameters: int) -> tuple[str | None, str]:
        complaint = ""
        for path in reversed(self._complete()):
            damage = _damage(path)
            if damage is None:
                state = RunState.model_validate_json((path / "state.json").read_bytes())
                if (state.model_type, state.parameters) == (model_type, parameters):
                    return str(path), ""
                damage = f"it is of another model ({state.model_type}, {state.parameters} parameters)"
            log.warning("checkpoint not used", path=str(path), reason=damage)
            complaint = complaint or (
                f"no checkpoint in {self.directory} can be used; the newest, {path.name}: {damage}. "
                "Give another RUN_ID, or set RESUME=false to start anew."
            )
        return None, complaint


def _write_manifest(directory: Path) -> None:
    files = {
        str(file.relative_to(directory)): {"bytes": file.stat().st_size, "blake2b": _checksum(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    (directory / "manifest.json").write_bytes(orjson.dumps(files, option=orjson.OPT_INDENT_2))


def _damage(directory: Path) -> str | None:
    """Why a checkpoint cannot be used; None when every file is as it was written."""
    try:
        files = orjson.loads((directory / "manifest.json").read_bytes())
        for name, expected in files.items():
            file = directory / name
            if file.stat().st_size != expected["bytes"] or _checksum(file) != expected["blake2b"]:
                return f"{name} is not as it was written"
        RunState.model_validate_json((directory / "state.json").read_bytes())
    except (OSError, ValueError, KeyError, ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
