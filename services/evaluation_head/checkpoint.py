"""Torch policies as files: a module exported with a free batch dimension, and the form of its states and actions.

``policy.pt2`` is written by ``torch.export``, so a head does not need the code that made the module. The versions of a
policy store are files ``v000001/policy.pt2`` below one directory.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch.export import Dim
from torch.fx import GraphModule

from services.core.files import atomic_write
from services.protocol.evaluation import ActionKind, ActionSpec, StateSpec
from services.weights.policy_store import PolicyStore

FILE_NAME = "policy.pt2"
_SPEC = "policy.json"
MAX_BATCH = 65_536


class CheckpointError(ValueError):
    """A file that is not a usable policy; the message says why."""


class PolicySpec(BaseModel):
    """The form of a module's input and output: scores of the indices, of which the highest wins, or numbers."""

    state: StateSpec
    action: ActionSpec
    parameters: int = Field(default=0, ge=0)

    @property
    def output_shape(self) -> list[int]:
        """Shape of the module's output for one state."""
        return [self.action.count or 0] if self.action.kind is ActionKind.INDEX else self.action.shape


@dataclass(frozen=True)
class Source:
    """A checkpoint file; ``modified`` is the time in nanoseconds at which it was written."""

    version: int | None
    file: Path
    modified: int


@dataclass(frozen=True)
class Loaded:
    """A policy on its device, ready to run."""

    spec: PolicySpec
    module: GraphModule
    source: Source
    device: torch.device

    @torch.inference_mode()
    def decide(self, states: NDArray[np.float32]) -> tuple[list[Any], list[float | None], list[bool]]:
        """Return for each of ``states`` [batch, *shape]: the action, its log-probability, and whether both are finite.

        An index has the highest score; its log-probability is that of the scores' softmax. Numbers have None.
        """
        output = self.module(torch.from_numpy(states).to(self.device)).float()
        finite = output.isfinite().reshape(len(states), -1).all(dim=1).tolist()
        if self.spec.action.kind is not ActionKind.INDEX:
            return output.tolist(), [None] * len(states), finite
        best = output.argmax(dim=-1, keepdim=True)
        logprobs = output.log_softmax(dim=-1).gather(-1, best)
        return (best.squeeze(-1) + self.spec.action.start).tolist(), logprobs.squeeze(-1).tolist(), finite


def save_policy(module: torch.nn.Module, path: Path | str, state: StateSpec, action: ActionSpec) -> None:
    """Write ``module`` to ``path``, whole or not at all.

    Args:
        module: takes float32 states [batch, *state.shape]; gives scores [batch, count] or numbers [batch, *shape].
        path: the ``.pt2`` file.
        state: the form of the states, which are numbers.
        action: the form of the actions, an index or numbers.

    Raises:
        ValueError: the module's output does not have the form of ``action``.
    """
    module = module.eval()
    spec = PolicySpec(state=state, action=action, parameters=sum(p.numel() for p in module.parameters()))
    example = torch.zeros(2, *state.shape)
    with torch.no_grad():
        output = module(example)
        if list(output.shape) != [2, *spec.output_shape]:
            raise ValueError(f"the module gives {list(output.shape)} for 2 states; needed is {[2, *spec.output_shape]}")
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: Dim("batch", min=1, max=MAX_BATCH)},))
    path, content = Path(path), io.BytesIO()
    torch.export.save(exported, content, extra_files={_SPEC: spec.model_dump_json()})
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content.getvalue())


def publish_policy(
    module: torch.nn.Module, directory: Path | str, version: int, state: StateSpec, action: ActionSpec
) -> Path:
    """Write ``module`` as ``version`` below ``directory``, where a running head finds it; return the file."""
    store = PolicyStore(Path(directory))
    save_policy(module, store.begin(version) / FILE_NAME, state, action)
    return store.commit(version) / FILE_NAME


def find(target: Path) -> Source:
    """Return the policy's file: ``target`` itself, or the newest version below it.

    Raises:
        CheckpointError: the file does not exist.
    """
    try:
        newest = PolicyStore(target).newest()
        if newest is None and target.is_dir():
            raise CheckpointError(_not_a_store(target))
        file = newest.path / FILE_NAME if newest else target
        return Source(newest.version if newest else None, file, file.stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"no policy at {target}: {error}") from error


def _not_a_store(directory: Path) -> str:
    if (directory / "config.json").exists():
        return f"{directory} is a language model; serve it, and give the server's URL, such as http://127.0.0.1:30000"
    return f"{directory} has no versions; needed is a directory of versions with v000001/{FILE_NAME}, or a .pt2 file"


def load(source: Source, device: torch.device) -> Loaded:
    """Read a checkpoint and try it on one state and on several.

    Raises:
        CheckpointError: the file is not a policy, or its output does not have the form that it says.
    """
    about = {_SPEC: ""}
    try:
        module = torch.export.load(source.file, extra_files=about).module().to(device)
        spec = PolicySpec.model_validate_json(about[_SPEC])
        with torch.inference_mode():
            shapes = [list(module(torch.zeros(n, *spec.state.shape, device=device)).shape) for n in (1, 3)]
    # torch raises errors of many types for a file that is damaged or something else.
    except Exception as error:
        raise CheckpointError(
            f"{source.file} cannot be read: {type(error).__name__}: {str(error)[:300]}; needed is a .pt2 file of "
            f"save_policy, or a directory of versions with v000001/{FILE_NAME}"
        ) from error
    if shapes != [[n, *spec.output_shape] for n in (1, 3)]:
        raise CheckpointError(f"{source.file} gives {shapes[0]} for one state, not {[1, *spec.output_shape]}")
    return Loaded(spec, module, source, device)
