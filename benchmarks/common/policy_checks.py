"""What ``benchmarks.policy`` checks before it measures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from scripts.cartpole_policy import ACTION, STATE, CartPolePolicy
from services.core.errors import ConfigurationError
from services.environment_server.gymnasium_environment import GymnasiumEnvironment
from services.evaluation_head import checkpoint

PROCESS_MB = 400
"""What a process with torch takes beside its model."""
CHECKED_STATES = 16


def preflight(options: argparse.Namespace) -> Path:
    """Checks all that can be wrong before anything is measured; returns where the policy lies.

    Raises:
        ConfigurationError: something is.
    """
    for name in ("total_battles", "num_workers"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed is 1 or more")
    if options.num_workers > options.total_battles:
        raise ConfigurationError(
            f"--num-workers {options.num_workers} would leave workers without one of --total-battles "
            f"{options.total_battles}; give as many battles as workers or more"
        )
    options.batch_size = options.num_workers if options.batch_size is None else options.batch_size
    if options.batch_size < 1 or options.timeout_ms < 0:
        raise ConfigurationError("--batch-size is 1 or more, --timeout-ms 0 or more")
    _check("results can be written", _writable, options.save_dir)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = options.policy or _make_policy(options)
    loaded = _check("the policy loads", _load, policy, options.device)
    states = _check("the environment fits the policy", _first_states, options, loaded)
    _check("a batch gives the actions of its states alone", _batch_agrees, loaded, states)
    _check("there is memory for a model a worker", _fits_memory, options, loaded)
    if options.batch_size > options.num_workers:
        print(
            f"note: {options.num_workers} workers never fill a batch of {options.batch_size}, so that each batch waits "
            f"{options.timeout_ms:g} ms; --batch-size {options.num_workers} would not"
        )
    return policy


def _check(what: str, check: Any, *arguments: Any) -> Any:
    result = check(*arguments)
    print(f"ok: {what}")
    return result


def _writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"--save-dir {directory} cannot be written to: {error.strerror}") from error


def _make_policy(options: argparse.Namespace) -> Path:
    path: Path = options.save_dir / f"cartpole-{options.width}x{options.layers}.pt2"
    if not path.exists():
        checkpoint.save_policy(CartPolePolicy(options.width, options.layers, 0), path, STATE, ACTION)
    return path


def _load(policy: Path, device: str) -> checkpoint.Loaded:
    try:
        return checkpoint.load(checkpoint.find(policy), torch.device(device))
    except (checkpoint.CheckpointError, RuntimeError) as error:
        raise ConfigurationError(f"--policy, --device: {error}") from error


def _first_states(options: argparse.Namespace, loaded: checkpoint.Loaded) -> list[Any]:
    try:
        environment = GymnasiumEnvironment.make(options.environment)
    # gymnasium raises its own errors, and whatever the environment's package does.
    except Exception as error:
        raise ConfigurationError(f"--environment {options.environment!r}: {error}") from error
    spec = loaded.spec
    if (environment.state_spec, environment.action_spec) != (spec.state, spec.action):
        raise ConfigurationError(
            f"--environment {options.environment!r} has states {environment.state_spec!r} and actions "
            f"{environment.action_spec!r}, the policy {spec.state!r} and {spec.action!r}"
        )
    states = [environment.reset(options.seed + i) for i in range(CHECKED_STATES)]
    environment.close()
    return states


def _batch_agrees(loaded: checkpoint.Loaded, states: list[Any]) -> None:
    rows = np.asarray(states, np.float32)
    together, finite = loaded.decide(rows)
    alone = [loaded.decide(row[None])[0][0] for row in rows]
    if not all(finite):
        raise ConfigurationError("the policy gives NaN or infinity for first states of the environment")
    if not np.allclose(together, alone, rtol=1e-3, atol=1e-4):
        raise ConfigurationError("the policy gives other actions for a batch than for its states one by one")


def _fits_memory(options: argparse.Namespace, loaded: checkpoint.Loaded) -> None:
    model_mb = 4 * loaded.spec.parameters / 1e6
    needed, free = options.num_workers * (PROCESS_MB + 2 * model_mb), psutil.virtual_memory().available / 1e6
    if needed > free:
        raise ConfigurationError(
            f"{options.num_workers} workers with a model each need about {needed:.0f} MB, there are {free:.0f}; give "
            "fewer --num-workers or a smaller policy"
        )
