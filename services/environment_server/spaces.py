"""Gymnasium's spaces on the wire: observations as numbers, actions as indices or numbers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError
from services.protocol.evaluation import Action, ActionKind, ActionSpec, State, StateKind, StateSpec


class UnsupportedSpaceError(ValueError):
    """A space of observations or actions that has no form on the wire."""


def state_spec(space: gymnasium.Space[Any]) -> StateSpec:
    """Describe the states of an observation space. A Box keeps its shape; any other space is flattened to a vector.

    Raises:
        UnsupportedSpaceError: the space has no vector of fixed length.
    """
    if isinstance(space, spaces.Box):
        return StateSpec(kind=StateKind.NUMBERS, shape=list(space.shape))
    try:
        flat = spaces.flatten_space(space)
    except NotImplementedError as error:
        raise UnsupportedSpaceError(f"its observations, {space}, cannot be flattened to numbers") from error
    if not isinstance(flat, spaces.Box) or not space.is_np_flattenable:
        raise UnsupportedSpaceError(f"its observations, {space}, have no fixed number of numbers")
    return StateSpec(kind=StateKind.NUMBERS, shape=list(flat.shape))


def action_spec(space: gymnasium.Space[Any]) -> ActionSpec:
    """Describe the actions of an action space.

    Raises:
        UnsupportedSpaceError: they are neither an index, indices nor numbers.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpec(kind=ActionKind.INDEX, count=int(space.n), start=int(space.start))
    if isinstance(space, spaces.Box):
        return ActionSpec(kind=ActionKind.NUMBERS, shape=list(space.shape))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return ActionSpec(kind=ActionKind.INDICES, shape=list(space.shape))
    raise UnsupportedSpaceError(f"its actions, {space}, are neither an index, indices nor numbers")


def encode_state(space: gymnasium.Space[Any], observation: Any) -> State:
    """Return an observation as JSON has it, nested lists of numbers in the shape of ``state_spec``.

    Raises:
        EnvironmentBrokenError: the observation is not finite.
    """
    array = np.asarray(observation if isinstance(space, spaces.Box) else spaces.flatten(space, observation))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise EnvironmentBrokenError("the environment gave an observation that is not finite")
    encoded: State = array.tolist()
    return encoded


def decode_action(space: gymnasium.Space[Any], action: Action) -> Any:
    """Return an action as the environment takes it. Numbers beyond a Box's bounds are clipped to them.

    Raises:
        ActionRefusedError: the space does not contain the action.
    """
    shown = repr(action) if len(repr(action)) <= 60 else repr(action)[:60] + "..."
    if isinstance(space, spaces.Discrete):
        if isinstance(action, bool) or not isinstance(action, int) or not space.contains(np.int64(action)):
            last = space.start + space.n - 1
            raise ActionRefusedError(f"the action is {shown}; allowed is a whole number from {space.start} to {last}")
        return np.int64(action)
    try:
        array = np.asarray(action)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.shape != space.shape or array.dtype.kind not in "iuf":
        kind, shape = "numbers" if isinstance(space, spaces.Box) else "whole numbers", list(space.shape or ())
        raise ActionRefusedError(f"the action is {shown}; allowed are {kind} of shape {shape}")
    if isinstance(space, spaces.Box):
        if not np.isfinite(array).all():
            raise ActionRefusedError("the action has numbers that are not finite; allowed are finite ones")
        return np.clip(array, space.low, space.high).astype(space.dtype)
    if array.dtype.kind == "f" or not space.contains(array.astype(space.dtype)) or array.min(initial=0) < 0:
        raise ActionRefusedError(f"the action is {shown}; allowed are whole numbers of {space}")
    return array.astype(space.dtype)
