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
from services.core.tasks import in_background
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
    """An environment that does not exist here or cannot be made; the message says why."""


class Catalogue:
    """Makes environments by id. Data that an environment needs is loaded once, when it is first asked for."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._resources = AsyncExitStack()
        self._loading: asyncio.Task[gsm8k.Questions] | None = None
        self._known: set[str] = set()

    async def maker(self, environment_id: str) -> MakeEnvironment:
        """Return a function that makes an environment of that id, in any thread.

        Raises:
            UnknownEnvironmentError: there is no such environment, or it cannot be made here.
        """
        turns = self._settings.environment_text_turns
        if environment_id == GUESSING:
            return lambda: GuessingGame(turns)
        if environment_id == GSM8K:
            # Needs the packages of data-server and reward-server, which the other environments do without.
            from services.environment_server.gsm8k import QuestionWithCalculator

            questions = await self._questions()
            return lambda: QuestionWithCalculator(questions, turns)
        if environment_id not in self._known:
            await self._try(environment_id)
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
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
        await self._resources.aclose()

    async def _questions(self) -> gsm8k.Questions:
        from services.environment_server import gsm8k

        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.ensure_future(self._resources.enter_async_context(gsm8k.open_questions()))
        try:
            # Shielded, so that a client that leaves does not end the loading for the others.
            return await asyncio.shield(self._loading)
        except ConfigurationError as error:
            raise UnknownEnvironmentError(f"environment {GSM8K!r} cannot be made here: {error}") from error

    async def _try(self, environment_id: str) -> None:
        # "module:Id" imports the module, which only the operator may ask for.
        if ":" in environment_id and environment_id != self._settings.environment:
            raise UnknownEnvironmentError(
                f"environment {environment_id!r} would import a module; set ENVIRONMENT to it where the server starts"
            )
        try:
            made = await in_background(lambda: _maker(environment_id)())
        # gymnasium raises its own errors, and constructors are other people's code that may raise anything.
        except Exception as error:
            raise UnknownEnvironmentError(
                f"environment {environment_id!r} cannot be made here: {type(error).__name__}: {error}"
            ) from error
        made.close()
        self._known.add(environment_id)


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
