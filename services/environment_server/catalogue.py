"""The environments that ENVIRONMENT may name, and how one is made."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import ModuleType

import gymnasium

from services.core.errors import ConfigurationError, NeverReadyError
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
async def open_environment(settings: EnvironmentSettings) -> AsyncIterator[MakeEnvironment]:
    """Load the data of an environment, and yield a function that makes it for one episode, in any thread.

    Raises:
        ImportError: there is no such module.
        ConfigurationError: the environment's data cannot be loaded, its server is none of OpenEnv, or the module has no
            such class.
        NeverReadyError: its server does not answer.
    """
    name, turns = settings.environment, settings.environment_text_turns
    if name == "guessing":
        yield partial(GuessingGame, turns)
    elif name == "nim":
        yield Nim
    elif name.startswith(PREFIX):
        yield await open_server(name, settings.service_deadline_seconds)
    elif name == "gsm8k":
        # Needs the packages of data-server and reward-server, which the other environments do without.
        from services.environment_server import gsm8k

        async with gsm8k.open_questions() as questions:
            yield gsm8k.QuestionTasks(questions, turns)
    else:
        module, _, attribute = name.partition(":")
        if name.isidentifier() and importlib.util.find_spec(name) is not None:
            classes = _names_in(importlib.import_module(name)) or ["MyEnvironment"]
            raise ConfigurationError(f"{name} is a module; name its class, too, as in {name}:{classes[0]}")
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
    names = ", ".join(_names_in(module)) or "none"
    raise ConfigurationError(f"module {module.__name__} has no class {attribute}; it has {names}")


def _names_in(module: ModuleType) -> list[str]:
    """Return the names of a module's Conversations, and the ids that it has registered with gymnasium."""
    classes = inspect.getmembers(module, lambda member: inspect.isclass(member) and issubclass(member, Conversation))
    names = [name for name, member in classes if member.__module__ == module.__name__]
    return names + [
        spec.id
        for spec in gymnasium.registry.values()
        if module.__name__
        == (spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else spec.entry_point.__module__)
    ]


async def open_with_trial(
    settings: EnvironmentSettings, stack: AsyncExitStack, variable: str = "ENVIRONMENT"
) -> tuple[MakeEnvironment, Environment]:
    """Load an environment until ``stack`` closes, and return a function that makes it, and one that it made.

    ``variable`` is the setting or option that names it, for messages.

    Raises:
        ConfigurationError: it cannot be loaded or made.
        NeverReadyError: it is on a server that does not answer.
    """
    try:
        make = await stack.enter_async_context(open_environment(settings))
        return make, await in_background(make)
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
