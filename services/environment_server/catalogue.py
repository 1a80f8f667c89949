"""The environments that ENVIRONMENT may name, and how one is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import ModuleType

import gymnasium

from services.core.errors import ConfigurationError
from services.core.tasks import in_background
from services.environment_server.environments import Conversation, Tasks, why_failed
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
        ConfigurationError: the environment's data cannot be loaded, its server does not answer, or the module has no
            such class.
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
        found = _conversation_of(importlib.import_module(module), attribute) if attribute else None
        yield found or partial(GymnasiumEnvironment, name)


def _conversation_of(module: ModuleType, attribute: str) -> type[Conversation] | None:
    """Return the Conversation of a module; None for an environment that the module has registered with gymnasium.

    Raises:
        ConfigurationError: it has neither.
    """
    found = getattr(module, attribute, None)
    if inspect.isclass(found) and issubclass(found, Conversation):
        return found
    registered = {spec.id: spec.entry_point for spec in gymnasium.registry.values()}
    if attribute in registered or attribute in (spec_id.rpartition("-v")[0] for spec_id in registered):
        return None
    if found is not None:
        raise ConfigurationError(
            f"{module.__name__}:{attribute} is no subclass of Conversation, and no id registered with gymnasium"
        )
    classes = inspect.getmembers(module, lambda member: inspect.isclass(member) and issubclass(member, Conversation))
    names = [name for name, member in classes if member.__module__ == module.__name__]
    names += [
        spec_id
        for spec_id, entry in registered.items()
        if module.__name__ == (entry.partition(":")[0] if isinstance(entry, str) else entry.__module__)
    ]
    raise ConfigurationError(f"module {module.__name__} has no class {attribute}; it has {', '.join(names) or 'none'}")


async def open_with_trial(
    settings: EnvironmentSettings, stack: AsyncExitStack, variable: str = "ENVIRONMENT"
) -> tuple[MakeEnvironment, Environment]:
    """Load an environment until ``stack`` closes, and return a function that makes it, and one that it made.

    ``variable`` is the setting or option that names it, for messages.

    Raises:
        ConfigurationError: it cannot be loaded or made.
    """
    try:
        opened = open_environment(settings.environment, settings.environment_text_turns)
        make = await stack.enter_async_context(opened)
        return make, await in_background(make)
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
