"""Jobs that tests run on one rank or on several. Results are plain numbers and NumPy arrays, the same on every rank."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor, distribute_tensor

from services.core.errors import ConfigurationError
from services.protocol.prompts import Cursor
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.checkpoints.state import Fingerprint, RunState
from trainer.config import TrainerSettings
from trainer.model import saving
from trainer.model.gathering import gather_state
from trainer.model.learner import Learner, UpdateResult
from trainer.model.optimizer import StopRequestedError
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import MeasuredRounding, Rounding
from trainer.model.saving import DiskFullError, save_pretrained, write_adapter
from trainer.publishing.writer import VersionWriter
from trainer.rank_calls import RankCalls

Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]

UNCLIPPED: dict[str, Any] = {"compute_type": "float32", "max_grad_norm": 1e9, "learning_rate": 1e-2}


@dataclass
class Trained:
    """The result of an update, the gradients of its last optimizer step, and the weights afterwards."""

    result: UpdateResult
    gradients: Arrays
    weights: Arrays


def options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of UNCLIPPED, and with weights that are published in the type that is computed in."""
    chosen: dict[str, Any] = UNCLIPPED | settings
    return {"publish_type": chosen["compute_type"]} | chosen


def make_learner(ranks: Ranks, model: Path, total_steps: int = 10, **settings: Any) -> Learner:
    """Return a learner of the model in a directory."""
    chosen = TrainerSettings.load(model_name=str(model), **options(settings))
    return Learner(chosen, load_policy(chosen, ranks), ranks, total_steps)


def update(ranks: Ranks, model: Path, settings: dict[str, Any], groups: Sequence[TrainingGroup]) -> Trained:
    """Make one update with a new learner."""
    learner = make_learner(ranks, model, **settings)
    gradients: Arrays = {}

    def remember(*_: Any) -> None:
        gradients.update(
            {plain_name(name): array(p.grad) for name, p in learner.policy.named_parameters() if p.grad is not None}
        )

    learner.optimizer.register_step_pre_hook(remember)
    result = learner.update(groups, 0)
    result.seconds = 0.0
    return Trained(result, gradients, weights_of(learner.policy))


def updates_of_many_shapes(
    ranks: Ranks, model: Path, cases: Sequence[dict[str, Any]], groups: Sequence[TrainingGroup]
) -> list[Trained]:
    """Make one update with each of several settings."""
    return [update(ranks, model, settings, groups) for settings in cases]


def updates_of_models(
    ranks: Ranks, cases: Mapping[str, tuple[Path, dict[str, Any]]], groups: Sequence[TrainingGroup]
) -> dict[str, Trained | str]:
    """Make an update of each model with its settings; return what it gave, or the message of its error."""
    updates: dict[str, Trained | str] = {}
    for name, (model, settings) in cases.items():
        try:
            updates[name] = update(ranks, model, settings, groups)
        except (RuntimeError, ValueError, ConfigurationError) as error:
            updates[name] = f"{type(error).__name__}: {error}"
    return updates


def weights_of(policy: nn.Module) -> Arrays:
    """Return every whole parameter by its name in the plain model."""
    return {plain_name(name): array(parameter) for name, parameter in policy.named_parameters()}


def plain_name(name: str) -> str:
    """Return a parameter's name in the model that the policy wraps."""
    return name.removeprefix("model.").replace("_checkpoint_wrapped_module.", "")


def array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a copy of the whole tensor; a collective if it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy(force=True).astype(np.float32, copy=True)


def train_and_write_adapter(
    ranks: Ranks, model: Path, directory: Path, groups: Sequence[TrainingGroup], settings: dict[str, Any], steps: int
) -> list[list[list[float]]]:
    """Train LoRA adapters, write them to ``directory``/adapter, and merged in float32 to ``directory``/merged.

    Return the policy's log-probabilities of every group.
    """
    learner = make_learner(ranks, model, **settings)
    for step in range(steps):
        learner.update(groups, step)
    policy = learner.policy
    state = gather_state(policy.adapter_parameters(getattr(torch, learner.settings.publish_type)), ranks, copy=True)
    ranks.on_main(lambda: write_adapter(policy, state, directory / "adapter"))
    save_pretrained(policy, ranks, directory / "merged", Rounding(torch.float32))
    return learner.logprobs(groups, temperature=1.0)


def published(ranks: Ranks, model: Path, size: float, replicas: int = 1) -> tuple[dict[str, bytes], float | None]:
    """Change a policy; return its weights in bfloat16, on rank 0, and the share of the change that they have."""
    ranks = ranks.replicated(replicas)
    learner = make_learner(ranks, model, publish_type="bfloat16")
    rounding = measured(learner.policy)
    change(learner.policy, size)
    weights = gather_state(learner.policy.full_parameters(Rounding(torch.bfloat16)), ranks, copy=True)
    return {name: x.view(torch.int16).numpy().tobytes() for name, x in weights.items()}, rounding.share(ranks)


def measured(policy: Policy) -> MeasuredRounding:
    """Return the rounding of a policy's weights, which measures from here on."""
    with policy.masters.in_place():
        rounding = policy.masters.rounding = MeasuredRounding(policy.masters.parameters.items())
    return rounding


def change(policy: Policy, size: float) -> None:
    """Move every master weight by ``size`` up or down, alike on any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), policy.masters.in_place():
        for parameter in policy.parameters():
            moves = size * torch.randn(parameter.shape, generator=generator).sign()
            if isinstance(parameter, DTensor):
                moves = distribute_tensor(moves, parameter.device_mesh, parameter.placements)
            parameter.add_(moves)


def computed_and_published(
    ranks: Ranks, model: Path, directory: Path, settings: dict[str, Any], groups: Sequence[TrainingGroup]
) -> tuple[Arrays, list[PerToken]]:
    """Make an update of two optimizer steps and publish the policy as version 1 of the run ``r`` in ``directory``.

    Return the weights of the next forward pass and its log-probabilities.
    """
    learner = make_learner(ranks, model, shared_dir=directory, run_id="r", updates_per_batch=2, **settings)
    learner.update(groups, 0)
    computed: Arrays = {}

    def remember(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            computed[names[module] + name] = array(parameter.detach().clone().float())

    decoder = learner.policy.causal_lm().base_model
    names = {part: f"{name}." for name, part in learner.policy.causal_lm().named_modules()}
    hooks = [part.register_forward_pre_hook(remember) for part in decoder.modules()]
    logprobs = learner.logprobs(groups, temperature=1.0)
    for hook in hooks:
        hook.remove()
    writer = VersionWriter(learner.settings, learner.policy, ranks)
    writer.write(1)
    writer.close()
    return computed, logprobs


def update_and_save_model(
    ranks: Ranks, model: Path, directory: Path, groups: Sequence[TrainingGroup], settings: dict[str, Any]
) -> list[list[list[float]]]:
    """Make one update and save the model in float32; return the policy's log-probabilities of every group."""
    learner = make_learner(ranks, model, **settings)
    learner.update(groups, 0)
    save_pretrained(learner.policy, ranks, directory, Rounding(torch.float32))
    return learner.logprobs(groups, temperature=1.0)


def stop_one_rank(ranks: Ranks, model: Path, groups: Sequence[TrainingGroup]) -> str:
    """Ask only the last rank to stop, in the middle of an update; return the outcome."""
    learner = make_learner(ranks, model, micro_batch_tokens=40)
    before, asked = weights_of(learner.policy), 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2 and ranks.rank == ranks.world_size - 1

    try:
        learner.training.should_stop = should_stop
        learner.update(groups, 0)
    except StopRequestedError:
        after = weights_of(learner.policy)
        return "stopped" if all(np.array_equal(after[name], before[name]) for name in before) else "changed"
    return "went on"


def run_state(learner: Learner, step: int, **others: Any) -> RunState:
    """Return a state for a learner's checkpoint."""
    return RunState(
        step=step,
        policy_version=step,
        model_type=learner.policy.config.model_type,
        parameters=sum(p.numel() for p in learner.policy.parameters()),
        cursors={"": Cursor(epoch=1, position=step)},
        fingerprint=Fingerprint(model="tiny", weights="1a", tokenizer="2b", dataset="arithmetic", data={}),
        **others,
    )


def train_and_save(
    ranks: Ranks,
    model: Path,
    directory: Path,
    groups: Sequence[TrainingGroup],
    steps: int,
    last: int,
    settings: dict[str, Any] | None = None,
) -> Arrays:
    """Save a checkpoint after each of ``steps`` updates, train on, and return the weights after ``last`` updates."""
    learner = make_learner(ranks, model, **settings or {})
    store = CheckpointStore(directory, steps, ranks)
    for step in range(last):
        learner.update(groups, step)
        if step < steps:
            # Only the last is waited for, so that the others are written beside the training.
            store.save(learner, run_state(learner, step + 1), wait=step + 1 == steps)
    return weights_of(learner.policy)


def save_on_a_full_disk(ranks: Ranks, model: Path, directory: Path) -> tuple[str, list[str]]:
    """Save two checkpoints, the second on a full disk of the last rank; return the error and the files left."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    learner = make_learner(ranks, model)
    store = CheckpointStore(directory, 2, ranks)
    store.save(learner, run_state(learner, 1), wait=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.tempfile, "TemporaryFile", fail)
        if ranks.rank == ranks.world_size - 1:
            patch.setattr(FileSystem, "create_stream", fail)
        try:
            store.save(learner, run_state(learner, 2), wait=True)
        except DiskFullError as error:
            said = str(error)
        else:
            said = "nothing"
    ranks.barrier()
    return said, sorted(path.name for path in directory.iterdir())


def resume_and_train(
    ranks: Ranks,
    model: Path,
    directory: Path,
    groups: Sequence[TrainingGroup],
    last: int,
    settings: dict[str, Any] | None = None,
) -> tuple[int, Arrays]:
    """Load the newest usable checkpoint and train to ``last``; return the checkpoint's step and the weights."""
    learner = make_learner(ranks, model, **settings or {})
    store = CheckpointStore(directory, 100, ranks)
    expected = run_state(learner, 0)
    found = store.newest(expected.model_type, expected.parameters)
    assert found is not None
    path, state = found
    store.load(path, learner)
    for step in range(state.step, last):
        learner.update(groups, step)
    return state.step, weights_of(learner.policy)


def hear_groups(ranks: Ranks, groups: list[TrainingGroup]) -> list[list[TrainingGroup]]:
    """Have rank 0 call ``values`` with groups and with none, and return what it is called with on this rank."""
    heard: list[list[TrainingGroup]] = []

    class Hearing:
        def values(self, groups: Sequence[TrainingGroup]) -> None:
            heard.append(list(groups))

    unused: Any = None
    hearing: Any = Hearing()
    rank_calls = RankCalls(unused, ranks, hearing, unused, unused)
    if ranks.is_main:
        with rank_calls.leading():
            rank_calls.on_all_ranks(hearing.values)(groups)
            rank_calls.on_all_ranks(hearing.values)([])
    else:
        rank_calls.follow()
    return heard
