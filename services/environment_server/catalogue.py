"""The environments that ENVIRONMENT may name, the functions that make them, and the adapter for gymnasium's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.wrappers import FlattenObservation

from services.core.errors import ConfigurationError, NeverReadyError
from services.core.tasks import in_background
from services.environment_server.environments import (
    ActionRefusedError,
    Conversation,
    EnvironmentBrokenError,
    Tasks,
    Transition,
    why_failed,
)
from services.environment_server.games import GuessingGame, Nim
from services.environment_server.openenv_environment import PREFIX, OpenEnvEnvironment, ask_for_forms
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import Action, ActionKind, ActionSpec, EnvironmentInfo, State, StateKind, StateSpec


class GymnasiumEnvironment:
    """One episode's environment of gymnasium. Its calls block while they compute.

    A Box of observations keeps its shape; observations of any other space are flattened to a vector. Where observations
    and actions are Text, the states are the messages so far. ``deterministic`` and ``version`` are attributes of the
    environment's class, as in Conversation.
    """

    def __init__(self, environment_id: str) -> None:
        """Make the environment.

        Raises:
            ConfigurationError: there is no such environment, its states are not a fixed number of numbers, or its
                actions are neither an index nor numbers.
            ImportError: the module before the colon cannot be imported.
            Exception: any error of the environment.
        """
        try:
            self._environment: gymnasium.Env[Any, Any] = gymnasium.make(environment_id, disable_env_checker=True)
        except gymnasium.error.Error as error:
            raise ConfigurationError(str(error).rstrip(".")) from error
        spaces = self._environment.observation_space, self._environment.action_space
        self._messages: list[dict[str, str]] | None = [] if all(isinstance(space, Text) for space in spaces) else None
        if not isinstance(spaces[0], Box) and self._messages is None:
            self._environment = FlattenObservation(self._environment)
        # Kept, because a wrapped environment asks every wrapper for its space.
        observations, actions = self._environment.observation_space, self._environment.action_space
        self._observations, self._actions = observations, actions
        self.deterministic = bool(getattr(self._environment.unwrapped, "deterministic", False))
        self.version = str(getattr(self._environment.unwrapped, "version", ""))
        if self._messages is not None:
            self.state_spec, self.action_spec = Conversation.state_spec, Conversation.action_spec
            return
        if not isinstance(observations, Box):
            raise ConfigurationError(f"its observations, {observations}, have no fixed number of numbers")
        self.state_spec = StateSpec(kind=StateKind.NUMBERS, shape=list(observations.shape))
        if isinstance(actions, Discrete):
            self._count, self._start = int(actions.n), int(actions.start)
            self.action_spec = ActionSpec(kind=ActionKind.INDEX, count=self._count, start=self._start)
        elif isinstance(actions, Box):
            self.action_spec = ActionSpec(kind=ActionKind.NUMBERS, shape=list(actions.shape))
        else:
            raise ConfigurationError(
                f"its actions, {actions}, are neither an index nor numbers; an environment of text has spaces Text "
                "for observations and for actions, or is a Conversation"
            )

    def reset(self, seed: int) -> State:
        """Begin the episode and return its first state. The same seed begins the same episode."""
        first = self._environment.reset(seed=seed)
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict)):
            raise EnvironmentBrokenError(f"reset() returned {first!r:.60}; return an observation and a dictionary")
        return self._state_of(first[0])

    def step(self, action: Action) -> Transition:
        """Take an action. Numbers beyond a Box's bounds are clipped to them.

        Raises:
            ActionRefusedError: it does not fit.
            EnvironmentBrokenError: the observation is not of its space.
            Exception: any error of the environment.
        """
        observation, reward, terminated, truncated, _ = self._environment.step(self._decoded(action))
        if self._messages is not None:
            self._messages.append({"role": "assistant", "content": str(action)})
        return Transition(self._state_of(observation), float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _state_of(self, observation: Any) -> State:
        """Return an observation as a value of JSON; of text, all messages with the observation as the last one."""
        if self._messages is None:
            return _encoded(observation, self._observations)
        if not isinstance(observation, str):
            raise EnvironmentBrokenError(f"the observation is {observation!r:.60}; its space is {self._observations}")
        self._messages.append({"role": "user", "content": str(observation)})
        return list(self._messages)

    def _decoded(self, action: Action) -> Any:
        """Return an action in the environment's type."""
        space = self._actions
        if isinstance(space, Discrete):
            if type(action) is not int or not 0 <= action - self._start < self._count:
                raise _refusal(action, space)
            return np.int64(action)
        if isinstance(space, Text):
            if action not in space:
                raise _refusal(action, space)
            return action
        try:
            array = np.asarray(action)
        except ValueError as error:  # lists of different lengths
            raise _refusal(action, space) from error
        if array.dtype.kind not in "iuf" or array.shape != space.shape or not np.isfinite(array).all():
            raise _refusal(action, space)
        return np.clip(array, space.low, space.high).astype(space.dtype)


def _refusal(action: Action, space: gymnasium.Space[Any]) -> ActionRefusedError:
    return ActionRefusedError(f"the action is {repr(action)[:60]}; the environment takes {space}")


def _encoded(observation: Any, space: gymnasium.Space[Any]) -> State:
    """Return an observation of a Box as nested lists of numbers; whole numbers fit into a Box of fractions."""
    array = np.asarray(observation)
    kinds = "biuf" if space.dtype is not None and space.dtype.kind == "f" else "biu"
    if array.shape != space.shape or array.dtype.kind not in kinds:
        raise EnvironmentBrokenError(f"the observation has the form {array.dtype}{array.shape}; its space is {space}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise EnvironmentBrokenError("the environment gave an observation that is not finite")
    encoded: State = array.tolist()
    return encoded


Environment = GymnasiumEnvironment | Conversation | OpenEnvEnvironment
MakeEnvironment = Callable[[int], Environment]
"""Makes the environment of one episode, which has the given seed."""


@asynccontextmanager
async def open_environment(settings: EnvironmentSettings) -> AsyncIterator[MakeEnvironment]:
    """Load the data of an environment, and yield the function that makes it, in any thread.

    Raises:
        ImportError: the module does not exist.
        ConfigurationError: the environment's data cannot be loaded, its server does not speak OpenEnv, or the module
            has no such class.
        NeverReadyError: its server does not answer.
    """
    name, turns = settings.environment, settings.text_turns
    if name == "guessing":
        yield lambda _seed: GuessingGame(turns)
    elif name == "nim":
        yield lambda _seed: Nim()
    elif name.startswith(PREFIX):
        url, forms = await ask_for_forms(name, settings.service_deadline_seconds)
        yield lambda _seed: OpenEnvEnvironment(url, forms)
    elif name == "gsm8k":
        # Needs the packages of data-server and reward-server, which the other environments do without.
        from services.environment_server import gsm8k

        async with gsm8k.open_questions(turns) as questions:
            yield questions
    elif name == "sandbox":
        from services.environment_server import sandbox_environment

        async with sandbox_environment.open_sandboxes(settings) as sandboxes:
            yield sandboxes
    else:
        module, _, attribute = name.partition(":")
        member = getattr(importlib.import_module(module), attribute, None) if attribute else None
        if inspect.isclass(member) and issubclass(member, Conversation):
            yield lambda _seed: member()
        else:
            yield lambda _seed: GymnasiumEnvironment(name)


async def open_with_trial(
    settings: EnvironmentSettings, stack: AsyncExitStack, variable: str = "ENVIRONMENT"
) -> tuple[MakeEnvironment, Environment]:
    """Load an environment until ``stack`` closes; return a factory and one trial instance.

    ``variable`` is the setting or option that names it, for messages.

    Raises:
        ConfigurationError: it cannot be loaded or made.
        NeverReadyError: it is on a server that does not answer.
    """
    try:
        make = await stack.enter_async_context(open_environment(settings))
        return make, await in_background(lambda: make(0))
    except NeverReadyError:
        raise
    # Environments are other people's code and may raise anything when they are made, SystemExit included.
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{variable} is {settings.environment!r}, which cannot be made: {why_failed(error)}; give another, or "
            "module:Class with the module on PYTHONPATH or in the working directory"
        ) from error


def describe(name: str, make: MakeEnvironment, trial: Environment, max_steps: int) -> EnvironmentInfo:
    """Return the form of an environment; ``trial`` was made by ``make``."""
    declared = make if isinstance(make, Tasks) else trial
    return EnvironmentInfo(
        id=name,
        state=trial.state_spec,
        action=trial.action_spec,
        max_steps=max_steps,
        seats=getattr(trial, "seats", 1),
        deterministic=getattr(declared, "deterministic", False),
        version=getattr(declared, "version", ""),
    )
