"""The return of a run to its newest checkpoint: the trainer's state and the published versions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.run_ids import job_id
from services.protocol.prompts import Cursor, DataStats
from services.weights.policy_store import PolicyStore
from trainer.checkpoints.admission import check_same
from trainer.checkpoints.checkpoint import FORMS, CheckpointStore, RunState, SavedCritic
from trainer.checkpoints.fingerprint import Fingerprint, tokenizer_digest
from trainer.config import Mode, TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks

log = get_logger(__name__)


def resume(
    settings: TrainerSettings,
    ranks: Ranks,
    policy: Policy,
    data: DataStats,
    learner: Learner,
    checkpoints: CheckpointStore,
    critic: SavedCritic | None = None,
) -> RunState:
    """Load the newest checkpoint and return its state; without one return a fresh state. A collective.

    Raises:
        ConfigurationError: no checkpoint can be used, or the newest has another model or other data.
    """
    fresh = RunState(
        model_type=policy.config.model_type,
        parameters=count_parameters(policy)
        + (0 if critic is None or critic.is_shared else count_parameters(critic.module)),
        cursor=Cursor(),
        fingerprint=_fingerprint(settings, policy, data),
        forms=FORMS,
        job=job_id(),
    )
    found = checkpoints.newest(fresh.model_type, fresh.parameters)
    if found is None:
        # An earlier attempt may have published versions before its first checkpoint.
        fresh.policy_version = ranks.on_main(lambda: _next_version(settings, fresh.policy_version))
        return fresh
    path, state = found
    before = state.fingerprint
    ranks.on_main(partial(_check_resumed, settings, path, state, fresh), ConfigurationError)
    state.fingerprint, state.forms, state.job = before or fresh.fingerprint, FORMS, fresh.job
    checkpoints.load(path, policy, learner.optimizer, critic)
    if state.random_state:
        torch.set_rng_state(torch.tensor(state.random_state, dtype=torch.uint8))
    state.policy_version = ranks.on_main(lambda: _next_version(settings, state.policy_version))
    log.info("resumed", checkpoint=str(path), step=state.step)
    return state


def _fingerprint(settings: TrainerSettings, policy: Policy, data: DataStats) -> Fingerprint | None:
    """Return the fingerprint of model and data on rank 0, which saves it; None on the others."""
    described = policy.description
    if described is None:
        return None
    return Fingerprint(
        model=settings.model_name,
        weights=described.weights_digest,
        tokenizer=tokenizer_digest(described.tokenizer),
        dataset=data.source,
        data=data.fingerprint,
    )


def _check_resumed(settings: TrainerSettings, path: Path, state: RunState, fresh: RunState) -> None:
    """Refuse a checkpoint with another model or other data; log when another job continues a run."""
    assert fresh.fingerprint is not None, "rank 0 has the model's description"
    check_same(settings, path, state.fingerprint, fresh.fingerprint)
    then = state.forms
    if changed := [f"{name}: {then.get(name)} then, {now} now" for name, now in FORMS.items() if then.get(name) != now]:
        log.warning("this release goes on otherwise than the one that saved the checkpoint", changed="; ".join(changed))
    if "run_id" not in settings.model_fields_set and state.job != fresh.job:
        log.warning(
            "another job, or one before a restart of the jobs controller, started this run; this job continues it. "
            "Give another RUN_ID to start anew",
            run=settings.run_id,
            step=state.step,
            begun_by=state.job,
            job=fresh.job,
        )


def _next_version(settings: TrainerSettings, version: int) -> int:
    """Return the version under which to publish the policy of a state that was saved as ``version`` (fresh: 0)."""
    store = PolicyStore(settings.policy_dir)
    # In synchronous mode the resumed run publishes the versions after the checkpoint again, with the same weights. In
    # asynchronous mode the queue may still hold groups of the abandoned steps, so no version is used twice, not even
    # one that was only begun: with PUBLISH_TRANSPORT=broadcast workers serve a version that is still being written.
    begun = store.newest_begun()
    if settings.mode is Mode.ASYNC and begun is not None:
        version = max(version, begun + 1)
    store.discard_after(version)
    return version


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, adapters included."""
    return sum(p.numel() for p in model.parameters())
