"""Checkpoints: all that makes a resumed run the same run, written while the training continues, and renamed into place.

A checkpoint is a directory ``step-000025`` with the sharded model and optimizer (torch.distributed.checkpoint; any
number of ranks can read it), ``state.json`` with the rest of the state, and ``manifest.json`` with the size and the
checksum of every file. It is written under a hidden name and renamed, so a directory with a plain name is complete. A
checkpoint that was damaged later does not match its manifest, and the one before it is used.

torch unpickles ``.metadata`` and every entry that is not a tensor. A pickle may call any function that it names, so
that whoever writes the volume could run code as the trainer. ``CheckpointReader`` runs nothing that is in the files.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import orjson
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from services.core.errors import ConfigurationError
from services.core.files import remove_directory, replace_directory, saved_steps
from services.core.logs import get_logger
from trainer.checkpoints.state import RunState
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError, writing

log = get_logger(__name__)

_MODULE = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_MODULE}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_MODULE}.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_MODULE}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""The modules and names in the metadata that torch writes, types of numbers aside."""


class CheckpointReader(FileSystemReader):
    """A reader whose metadata name nothing but what checkpoints consist of, and tensors wherever a run loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            UnpicklingError: the file is not as torch writes it.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            # Runs keep the hyperparameters of their settings, and load nothing else that is not a tensor.
            entries = metadata.state_dict_metadata.items()
            others = [name for name, kind in entries if not isinstance(kind, TensorStorageMetadata)]
            if strange := [name for name in others if "optimizer.param_groups." not in name]:
                raise pickle.UnpicklingError(f"{strange[0]} is not a tensor")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        # Broken pickles raise errors of many types.
        except Exception as error:
            raise pickle.UnpicklingError(f"{path} is not the metadata of a checkpoint: {error}") from error
        return metadata


def _member(kind: type[Enum], name: str) -> Enum:
    """Return the member of an enumeration, as which Python before 3.11.4 writes it: by ``getattr``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it has an attribute of {kind!r}, which no checkpoint has")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")


MANIFEST = "manifest.json"


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files below a directory."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    manifest = {
        str(file.relative_to(directory)): {"bytes": file.stat().st_size, "blake2b": checksum}
        for file, checksum in zip(files, _checksums(files), strict=True)
    }
    (directory / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def damaged_file(directory: Path) -> str | None:
    """Return the name of the first file that differs from the manifest; None when all are as they were written.

    Raises:
        OSError, ValueError, KeyError: the manifest or a file cannot be read.
    """
    manifest: dict[str, dict[str, Any]] = orjson.loads((directory / MANIFEST).read_bytes())
    files = {name: directory / name for name in manifest}
    # The sizes first, because they take no time.
    for name, file in files.items():
        if file.stat().st_size != manifest[name]["bytes"]:
            return name
    for name, checksum in zip(files, _checksums(list(files.values())), strict=True):
        if checksum != manifest[name]["blake2b"]:
            return name
    return None


def _checksums(files: Sequence[Path]) -> Iterator[str]:
    """Yield the checksum of each file, computed by as many threads as there are cores."""
    with ThreadPoolExecutor(os.cpu_count(), "checksum") as threads:
        yield from threads.map(_checksum, files)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return digest.hexdigest()


FILES = 4
"""Files that each rank writes, so that several threads write them and compute their checksums."""


class CheckpointStore:
    """The checkpoints of a run. Saving and loading are collectives of all ranks."""

    def __init__(self, directory: Path, kept: int, ranks: Ranks, kept_every: int = 0) -> None:
        self.directory = directory
        self.kept_every = kept_every
        """Checkpoints of multiples of this many steps stay; 0: none."""
        self.kept = kept
        self.ranks = ranks
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this process started to write, or loaded; None after a failed write."""
        self._removed_snapshots: list[str] = []
        self._pending: tuple[Future[Any], RunState] | None = None
        """The end of the write that is under way, and the state that is written."""
        # Saving runs its collectives in a thread of its own while the model trains, so it needs its own process group.
        self._group = dist.new_group(backend="gloo")
        # Checksums are computed while the model trains, because they read the whole checkpoint: 84 GB for a 7B model.
        self._sealer = ThreadPoolExecutor(1, "checkpoint-sealer")
        if ranks.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            # What a trainer that was killed had not finished: each takes as much room as a checkpoint.
            for unfinished in directory.glob(".step-*"):
                remove_directory(unfinished)

    def save(
        self, learner: Learner, state: RunState, critic: CriticLearner | None = None, *, wait: bool = False
    ) -> None:
        """Start to write a checkpoint: of a copy, while the training continues; with ``wait``, of the state itself.

        Args:
            learner: the learner of the policy, with its optimizer.
            state: the rest of the state.
            critic: the critic, if there is one.
            wait: return only when the checkpoint is in place.
        """
        self.finish()
        hidden = self._hidden(state.step)
        if self.ranks.is_main:
            shutil.rmtree(hidden, ignore_errors=True)
        self.ranks.barrier()
        writer = FileSystemWriter(hidden, thread_count=FILES)
        with learner.policy.masters.in_place():
            tensors, group = tensors_of(learner, critic), self._group
            if wait:
                written: Future[Any] = self._sealer.submit(save, tensors, storage_writer=writer, process_group=group)
            else:
                future = async_save(tensors, storage_writer=writer, process_group=group)
                written = cast("Future[Any]", future)
            # Rank 0's future is done when every rank has written its part.
            sealed = self._sealer.submit(_seal, written, hidden, state) if self.ranks.is_main else written
            self._pending = sealed, state
            self.saved_step = state.step
            if wait:
                self.finish()

    def poll(self) -> RunState | None:
        """Put a finished checkpoint in place and return its state, once, on every rank; never wait. A collective."""
        pending = self._pending
        if pending is None or self.ranks.any(not pending[0].done()):
            return None
        return self.finish()

    def finish(self) -> RunState | None:
        """Wait until the checkpoint that is being written, if any, is in place; return its state.

        Raises:
            DiskFullError: a rank could not write its part; the incomplete checkpoint is removed. Raised on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        complaint, (future, state) = "", pending
        hidden, final = self._hidden(state.step), self._path(state.step)
        try:
            with writing(hidden):
                future.result()
        except DiskFullError as error:
            complaint = str(error)
        complaints = [one for one in self.ranks.gather_json(complaint) if one]

        def put_in_place() -> None:
            if complaints:
                shutil.rmtree(hidden, ignore_errors=True)
                raise DiskFullError(complaints[0])
            with writing(final):
                replace_directory(hidden, final)
                self._remove_old(state)

        try:
            self.ranks.on_main(put_in_place, DiskFullError)
        except DiskFullError:
            self.saved_step = None
            raise
        return state

    def take_removed_snapshots(self) -> list[str]:
        """Return the replay buffer's snapshots of checkpoints removed since the last call. For rank 0 alone."""
        removed, self._removed_snapshots = self._removed_snapshots, []
        return removed

    def _remove_old(self, state: RunState) -> None:
        """Remove the checkpoints up to ``state`` that are not kept; later ones could not be used and do not count."""
        best = None if state.best_step is None else self._path(state.best_step)
        up_to_now = [path for path in self._complete() if path <= self._path(state.step)]
        for old in up_to_now[: -self.kept]:
            if old != best and (not self.kept_every or int(old.name.removeprefix("step-")) % self.kept_every):
                if (snapshot := _snapshot_of(old)) is not None:
                    self._removed_snapshots.append(snapshot)
                remove_directory(old)

    def newest(self, model_type: str, parameters: int) -> tuple[Path, RunState] | None:
        """Return the newest undamaged checkpoint of this model, the same on every rank; None without checkpoints.

        Raises:
            ConfigurationError: there are checkpoints, and all are damaged or of another model.
        """
        path = self.ranks.on_main(lambda: self._newest(model_type, parameters), ConfigurationError)
        return None if path is None else (Path(path), read_state(Path(path)))

    def load(self, path: Path, learner: Learner, critic: CriticLearner | None = None) -> None:
        """Load model and optimizer, and the critic's, from a checkpoint; see ``load_checkpoint``."""
        load_checkpoint(path, learner, critic)
        self.saved_step = int(path.name.removeprefix("step-"))

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _hidden(self, step: int) -> Path:
        return self.directory / f".step-{step:06d}.partial"

    def _complete(self) -> list[Path]:
        return [self._path(step) for step in saved_steps(self.directory)]

    def _newest(self, model_type: str, parameters: int) -> str | None:
        complaint = ""
        for path in reversed(self._complete()):
            reason = damage(path)
            if reason is None:
                state = read_state(path)
                if (state.model_type, state.parameters) == (model_type, parameters):
                    return str(path)
                reason = f"it is of another model or critic ({state.model_type}, {state.parameters} parameters)"
            log.warning("checkpoint not used", path=str(path), reason=reason)
            complaint = complaint or (
                f"no checkpoint in {self.directory} can be used; the newest, {path.name}: {reason}. "
                "Give another RUN_ID to start anew."
            )
        if complaint:
            raise ConfigurationError(complaint)
        return None


def load_checkpoint(path: Path, learner: Learner, critic: CriticLearner | None) -> None:
    """Load model and optimizer, and the critic's, from a checkpoint, sharded as in this run. A collective.

    The optimizers keep this run's parameter groups with their hyperparameters.
    """
    policy, optimizer = learner.policy, learner.optimizer
    with policy.masters.in_place():
        tensors = tensors_of(learner, critic)
        state = {name: {"state": x["state"]} if name.endswith("optimizer") else x for name, x in tensors.items()}
        load(state, storage_reader=CheckpointReader(path))
        for name, value in state.items():
            tensors[name] = tensors[name] | value
        set_state_dict(policy, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
    if critic is not None and not critic.is_shared:
        model, moments = tensors["critic_model"], tensors["critic_optimizer"]
        set_state_dict(critic.module, critic.optimizer, model_state_dict=model, optim_state_dict=moments)


def tensors_of(learner: Learner, critic: CriticLearner | None) -> dict[str, Any]:
    """Return the state of the models, which have their masters, and of their optimizers by its name in a checkpoint."""
    state: dict[str, Any] = {}
    _begin(learner.optimizer)
    state["model"], state["optimizer"] = get_state_dict(learner.policy, learner.optimizer)
    if critic is not None and not critic.is_shared:
        _begin(critic.optimizer)
        state["critic_model"], state["critic_optimizer"] = get_state_dict(critic.module, critic.optimizer)
    return state


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW's state before its first step to parameters that have had none, such as the policy's in warm-up.

    torch would make the missing state by a step on gradients of zero, which counts as a step.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if not optimizer.state[parameter]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            # On the parameter's device, because the fused kernel counts the steps there.
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}


def _seal(written: Future[Any], directory: Path, state: RunState) -> None:
    """Wait until the tensors are written, then write state and manifest into the same directory."""
    written.result()
    (directory / "state.json").write_bytes(orjson.dumps(state.model_dump(mode="json")))
    write_manifest(directory)


def read_state(directory: Path) -> RunState:
    """Return the state in a checkpoint, besides its tensors."""
    return RunState.model_validate_json((directory / "state.json").read_bytes())


def _snapshot_of(directory: Path) -> str | None:
    """Return the name of the replay buffer's snapshot of a checkpoint; None without one, or when it cannot be read."""
    try:
        return read_state(directory).replay_snapshot
    except (OSError, ValidationError):
        return None


def damage(directory: Path) -> str | None:
    """Return why a checkpoint cannot be used; None when every file matches the manifest and nothing in it would run."""
    try:
        damaged = damaged_file(directory)
        if damaged is not None:
            return f"{damaged} is not as it was written"
        CheckpointReader(directory).read_metadata()
        step = read_state(directory).step
        if directory.name != f"step-{step:06d}":
            return f"its state is of step {step}, not of the step of its name"
    except ValidationError:
        return "another version of this program wrote its state.json; continue with that version"
    except (OSError, ValueError, KeyError, UnpicklingError) as error:
        return str(error).splitlines()[0]
    return None
