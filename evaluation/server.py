"""An inference server of an evaluation, and the first of its two kinds: a rollout node, or a router of several."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import httpx
from pydantic import HttpUrl, TypeAdapter, ValidationError

from evaluation.settings import EvaluationSettings
from services.clients.rollout import RolloutClient, SamplingParams, generation_seconds
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason

PROMPT_SECONDS = 600.0
"""The longest time that a prompt may take at one server, unless its completions are long."""
CONNECT_SECONDS = 5.0
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of a completion's length limit in OpenAI's API: of most servers, and of OpenAI's newer models."""


@dataclass(frozen=True)
class UrlEndpoint(Endpoint):
    """An endpoint given by its URL, which may have https or a path."""

    base_url: str = ""

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self.base_url


def parse_url(text: str, *, is_api: bool = False) -> UrlEndpoint:
    """Return the endpoint of ``host:port`` or of a URL, without the /v1 of OpenAI's routes unless it ``is_api``.

    Raises:
        ConfigurationError: ``text`` is neither.
    """
    base = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("" if is_api else "/v1")
    try:
        url = TypeAdapter(HttpUrl).validate_python(base)
    except ValidationError as error:
        raise ConfigurationError(f"{text!r} is no address; give one such as http://127.0.0.1:30000") from error
    return UrlEndpoint(url.host or "", url.port or 80, base)


def prompt_seconds(settings: EvaluationSettings) -> float:
    """Return the longest time that one prompt may take at one server, by the length of its completions."""
    return max(PROMPT_SECONDS, generation_seconds(settings.max_new_tokens))


@dataclass(frozen=True)
class Answered:
    """A completion of a prompt; the numbers of tokens are 0 where the server does not count them."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    policy_version: int | None = None


class Server(ABC):
    """One server and its work. An async context manager."""

    probe_path: ClassVar[str]
    """The route, below ``url``, by whose answers the server lives."""
    probe_seconds: ClassVar[float] = 0.0
    """A server that answered so recently is not probed again; 0: at every look."""

    def __init__(self, url: str, api_url: str, token: str | None, seconds: float) -> None:
        """Make a server that is not asked yet.

        Args:
            url: identifies the server, in reports too.
            api_url: the base URL of its OpenAI routes.
            token: sent as ``Authorization: Bearer``.
            seconds: the longest time that one prompt may take.
        """
        self.url = url
        self.api_url = api_url
        self.token = token
        self.forced: dict[str, Any] = {}
        """Further fields of every request by OpenAI's routes."""
        self.limit_name = LIMITS[0]
        self.takes_seeds = True
        self.http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(),  # The places of a server bound its connections.
            trust_env=False,
        )
        """The client of agents; all episodes share its connections."""
        self.is_alive = False
        self.is_admitted = False
        self.answered = -1e9
        self.refusals = 0
        self.problem = "not asked yet"
        self.jobs: set[asyncio.Task[Any]] = set()
        self._stack = AsyncExitStack()

    @property
    def is_usable(self) -> bool:
        """Return whether the server gets work: it lives, and the last probe could connect."""
        return self.is_alive and not self.refusals

    @property
    def shortcomings(self) -> list[str]:
        """Facts of a report that this kind of server does not give."""
        return []

    @property
    def is_due(self) -> bool:
        """Return whether the server is to be probed again."""
        return bool(self.refusals) or time.monotonic() - self.answered >= self.probe_seconds

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def is_good(self, response: httpx.Response) -> bool:
        """Return whether a probe's answer says that the server can work."""
        return response.status_code == httpx.codes.OK

    @abstractmethod
    async def admit(self) -> None:
        """Check once, when the server first answers, that it takes our requests.

        Raises:
            ConfigurationError: it does not, as no server of this evaluation would.
            DependencyLostError: it does not answer after all.
        """

    @abstractmethod
    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Sequence[Answered]:
        """Return up to ``n`` completions of a prompt.

        Raises:
            RequestRefusedError: the server refuses the prompt.
            DependencyLostError: the server does not answer.
        """


class RolloutServer(Server):
    """A rollout node, an SGLang, or the router of several, which take token ids by /generate."""

    probe_path = "/health"

    def __init__(self, url: str, settings: EvaluationSettings, model: str, vocab_size: int) -> None:
        """Make a server of ``model``, a hub name or directory; token ids of prompts must be below ``vocab_size``."""
        seconds = prompt_seconds(settings)
        super().__init__(url, f"{url}/v1", settings.token, seconds)
        self.rollouts = RolloutClient(
            parse_url(url),
            settings.token,
            vocab_size=vocab_size,
            model_name=model,
            max_concurrency=settings.eval_concurrency,
            deadline_seconds=seconds,
            seed_each_completion=settings.engine_deterministic,
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.rollouts)
        return await super().__aenter__()

    async def admit(self) -> None:
        """See Server. A training run's workers serve the trained adapters beside the model, and these are asked for."""
        response = await self.http.get("/v1/models")
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"{self.url} refuses the token ({response.status_code}); set JOBGROUP_TOKEN to the servers' own"
            )
        adapter = await self.rollouts.find_adapter()
        self.forced = {} if adapter is None else {"lora_path": adapter}

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Sequence[Answered]:
        """See Server: one request for all completions, so that the engine computes the prompt once."""
        return [
            Answered(
                completion.completion,
                completion.finish_reason,
                len(prompt.prompt_ids),
                len(completion.completion_ids),
                completion.oldest_version if completion.policy_versions else None,
            )
            for completion in await self.rollouts.generate(prompt.prompt_ids, params, n=n, seed=seed)
        ]
