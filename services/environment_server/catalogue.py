"""The environments that ENVIRONMENT may name, and how one is made."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from services.core.errors import ConfigurationError
from services.core.tasks import in_background
from services.environment_server.environments import Conversation, Tasks
from services.environment_server.guessing import GuessingGame
from services.environment_server.gymnasium_environment import GymnasiumEnvironment
from services.environment_server.nim import Nim
from services.environment_server.openenv_environment import PREFIX, OpenEnvEnvironment, open_server
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import EnvironmentInfo

Environment = GymnasiumEnvironment | Conversation | OpenEnvEnvironment
MakeEnvironment = Callable[[], Environment]


@asynccontextmanager
async def open_environment(name: str, turns: int) -> AsyncIterator[MakeEnvironment]:
    """Load the data of an environment, and yield a function that makes it for one episode, in any thread.

    Args:
        name: a gymnasium id, ``module:Id``, ``module:Class`` for a Conversation, ``gsm8k``, ``guessing``, ``nim``, or
            ``openenv+http://host:port`` for an OpenEnv server.
        turns: answers that a built-in text environment allows.

    Raises:
        ImportError: there is no such module.
        ConfigurationError: the environment's data cannot be loaded, or its server does not answer.
    """
    if name == "guessing":
        yield partial(GuessingGame, turns)
    elif name == "nim":
        yield Nim
    elif name.startswith(PREFIX):
        yield await open_server(name)
    elif name == "gsm8k":
        # Needs the packages of data-server and reward-server, which the other environments do without.
        from services.environment_server import gsm8k

        async with gsm8k.open_questions() as questions:
            yield gsm8k.QuestionTasks(questions, turns)
    else:
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute, None) if attribute else None
        if isinstance(found, type) and issubclass(found, Conversation):
            yield found
        else:
            yield partial(GymnasiumEnvironment, name)


async def open_with_trial(settings: EnvironmentSettings, stack: AsyncExitStack) -> tuple[MakeEnvironment, Environment]:
    """Load ENVIRONMENT until ``stack`` closes, and return a function that makes it, and one that it made.

    Raises:
        ConfigurationError: it cannot be loaded or made.
    """
    try:
        opened = open_environment(settings.environment, settings.environment_text_turns)
        make = await stack.enter_async_context(opened)
        return make, await in_background(make)
    # Environments are other people's code and may raise anything when they are made.
    except Exception as error:
        raise ConfigurationError(
            f"ENVIRONMENT is {settings.environment!r}, which cannot be made: {error!r}; give another, or module:Class "
            "with the module on PYTHONPATH or in the working directory"
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
