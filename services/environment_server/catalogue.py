"""Which environments there are, and how one is made."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import gymnasium

from services.core.errors import ConfigurationError
from services.core.tasks import in_background
from services.environment_server.environments import Conversation, Environment
from services.environment_server.guessing import GuessingGame
from services.environment_server.gymnasium_environment import GymnasiumEnvironment
from services.environment_server.settings import EnvironmentSettings
from services.environment_server.spaces import UnsupportedSpaceError

if TYPE_CHECKING:
    from services.environment_server import gsm8k

GSM8K, GUESSING = "gsm8k", "guessing"
MakeEnvironment = Callable[[], Environment]


class UnknownEnvironmentError(ValueError):
    """There is no such environment here, or it cannot be made; the message says why."""


class Catalogue:
    """Makes environments by id. What one needs is loaded once, when it is first asked for."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._resources = AsyncExitStack()
        self._loading: asyncio.Task[gsm8k.Questions] | None = None
        self._known: set[str] = set()

    async def maker(self, environment_id: str) -> MakeEnvironment:
        """What makes an environment of that id, in this thread or another.

        Raises:
            UnknownEnvironmentError: there is none, or it cannot be made here.
        """
        turns = self._settings.environment_text_turns
        if environment_id == GUESSING:
            return lambda: GuessingGame(turns)
        if environment_id == GSM8K:
            # Needs the packages of data-server and reward-server, which the others do without.
            from services.environment_server.gsm8k import QuestionWithCalculator

            questions = await self._questions()
            return lambda: QuestionWithCalculator(questions, turns)
        if environment_id not in self._known:
            await self._try(environment_id)
        return _maker(environment_id)

    @staticmethod
    def is_conversation(environment_id: str) -> bool:
        """Whether environments of that id are Conversations."""
        return environment_id in (GSM8K, GUESSING) or conversation_class(environment_id) is not None

    def listed(self) -> list[str]:
        """Ids to offer: our own, the default, and what gymnasium has registered."""
        return sorted({self._settings.environment, GSM8K, GUESSING, *gymnasium.registry})

    async def close(self) -> None:
        """Lets go of what was loaded."""
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
        await self._resources.aclose()

    async def _questions(self) -> gsm8k.Questions:
        from services.environment_server import gsm8k

        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.ensure_future(self._resources.enter_async_context(gsm8k.open_questions()))
        try:
            # Shielded: one who no longer waits does not end the loading for the others.
            return await asyncio.shield(self._loading)
        except ConfigurationError as error:
            raise UnknownEnvironmentError(f"environment {GSM8K!r} cannot be had here: {error}") from error

    async def _try(self, environment_id: str) -> None:
        # "module:Id" imports the module: only the operator may ask for that.
        if ":" in environment_id and environment_id != self._settings.environment:
            raise UnknownEnvironmentError(
                f"environment {environment_id!r} would import a module; set ENVIRONMENT to it where the server starts"
            )
        try:
            made = await in_background(lambda: _maker(environment_id)())
        except (gymnasium.error.Error, ImportError, UnsupportedSpaceError) as error:
            raise UnknownEnvironmentError(f"environment {environment_id!r} cannot be had here: {error}") from error
        # Constructors are other people's code and may raise anything; the request is refused with it.
        except Exception as error:
            raise UnknownEnvironmentError(
                f"environment {environment_id!r} cannot be made: {type(error).__name__}: {error}"
            ) from error
        made.close()
        self._known.add(environment_id)


def conversation_class(environment_id: str) -> type[Conversation] | None:
    """The Conversation that ``module:Class`` names, whose module is imported; None for an id of gymnasium.

    Raises:
        ImportError: there is no such module.
    """
    module, _, name = environment_id.partition(":")
    if not name:
        return None
    found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Conversation) else None


def _maker(environment_id: str) -> MakeEnvironment:
    return conversation_class(environment_id) or (lambda: GymnasiumEnvironment.make(environment_id))
