"""The environments that a server offers, by their ids, and how one is made."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import gymnasium

from services.core.errors import ConfigurationError
from services.environment_server.environments import Conversation
from services.environment_server.guessing import GuessingGame
from services.environment_server.gymnasium_environment import GymnasiumEnvironment
from services.environment_server.settings import EnvironmentSettings

if TYPE_CHECKING:
    from services.environment_server import gsm8k

GSM8K, GUESSING = "gsm8k", "guessing"
Environment = GymnasiumEnvironment | Conversation
MakeEnvironment = Callable[[], Environment]


class UnknownEnvironmentError(ValueError):
    """An environment that this server does not offer; the message says why."""


class Catalogue:
    """Makes environments by id. Data that an environment needs is loaded once, when it is first asked for."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._resources = AsyncExitStack()
        self._loading = asyncio.Lock()
        self._questions: gsm8k.Questions | None = None

    async def maker(self, environment_id: str) -> MakeEnvironment:
        """Return a function that makes an environment of that id, in any thread.

        Raises:
            UnknownEnvironmentError: the id is not allowed here, or the environment's data cannot be loaded.
        """
        turns = self._settings.environment_text_turns
        if environment_id == GUESSING:
            return lambda: GuessingGame(turns)
        if environment_id == GSM8K:
            # Needs the packages of data-server and reward-server, which the other environments do without.
            from services.environment_server.gsm8k import QuestionWithCalculator

            questions = await self._load_questions()
            return lambda: QuestionWithCalculator(questions, turns)
        # "module:Id" imports the module, which only the operator may ask for.
        if ":" in environment_id and environment_id != self._settings.environment:
            raise UnknownEnvironmentError(
                f"environment {environment_id!r} would import a module; set ENVIRONMENT to it where the server starts"
            )
        return _maker(environment_id)

    @staticmethod
    def is_conversation(environment_id: str) -> bool:
        """Return whether environments of that id are conversations."""
        return environment_id in (GSM8K, GUESSING) or isinstance(_maker(environment_id), type)

    def listed(self) -> list[str]:
        """Return the ids to offer: the built-in ones, the default, and those registered with gymnasium."""
        return sorted({self._settings.environment, GSM8K, GUESSING, *gymnasium.registry})

    async def close(self) -> None:
        """Release what was loaded."""
        await self._resources.aclose()

    async def _load_questions(self) -> gsm8k.Questions:
        from services.environment_server import gsm8k

        async with self._loading:
            if self._questions is None:
                try:
                    self._questions = await self._resources.enter_async_context(gsm8k.open_questions())
                except ConfigurationError as error:
                    raise UnknownEnvironmentError(f"environment {GSM8K!r} cannot be made here: {error}") from error
            return self._questions


def _maker(environment_id: str) -> MakeEnvironment:
    """Return the Conversation class that ``module:Class`` names, importing the module, or a maker of gymnasium's id.

    Raises:
        ImportError: there is no such module.
    """
    module, _, name = environment_id.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if isinstance(found, type) and issubclass(found, Conversation):
        return found
    return partial(GymnasiumEnvironment, environment_id)
