"""The inference servers of an evaluation: rollout nodes and routers, and any server that speaks OpenAI's API.

A server of the second kind takes conversations by /chat/completions and renders them itself, or token ids by
/completions. It gives texts, no token ids, and need not say whether it uses a seed.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import httpx
from pydantic import BaseModel, Field, HttpUrl, TypeAdapter, ValidationError

from evaluation.settings import Api, EvaluationSettings
from services.clients.rollout import RolloutClient, SamplingParams, generation_seconds
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason

PROMPT_SECONDS = 600.0
"""The longest time that a prompt may take at one server, unless its completions are long."""
CONNECT_SECONDS = 5.0
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of a completion's length limit in OpenAI's API: of most servers, and of OpenAI's newer models."""
ADMISSION_TRIES = 3
"""Requests by which a server may be found to need another name of the limit, and no seed."""


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


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class OpenAIServer(Server):
    """A server that speaks OpenAI's API below ``url``, such as ``https://host/v1``."""

    probe_path = "/models"
    probe_seconds = 15.0

    def __init__(
        self, url: str, model: str, api: Api, key: str | None, places: int, seconds: float = PROMPT_SECONDS
    ) -> None:
        """Make a server.

        Args:
            url: the base URL of its OpenAI routes.
            model: the model's name in requests.
            api: the route that answers prompts; by COMPLETIONS they need token ids.
            key: the API key.
            places: requests in flight.
            seconds: the longest time that one prompt may take.
        """
        super().__init__(url, url, key, seconds)
        self.model = model
        self.api = api
        self.counts_tokens = True
        self.template_args: Mapping[str, Any] = {}
        """Arguments of the chat template for conversations."""
        self._client = HttpClient(
            url,
            token=key,
            service="the endpoint",
            timeout=seconds,
            deadline=seconds,
            max_connections=places,
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        return await super().__aenter__()

    @property
    def shortcomings(self) -> list[str]:
        """See Server."""
        seeds = "whether seeds are used" if self.takes_seeds else "samples by seed (it refuses them)"
        return ["token ids", seeds, *([] if self.counts_tokens else ["numbers of tokens"])]

    def is_good(self, response: httpx.Response) -> bool:
        """See Server: any answer but those of a proxy without a server, because a server need not have the route."""
        return response.status_code not in (502, 503, 504)

    async def admit(self) -> None:
        """See Server: the server must list the model, if it lists any, and answer a prompt."""
        await self._check_listed()
        for _ in range(ADMISSION_TRIES):
            body = self._body(Prompt(id="", prompt="", ground_truth="", prompt_ids=[1]), SamplingParams(1), 0)
            body |= {"messages": [{"role": "user", "content": "1"}]} if self.api is Api.CHAT else {}
            try:
                reply = await self._client.request("POST", self._path, body)
                break
            except RequestRefusedError as error:
                if not self._adapt_to(error):
                    raise ConfigurationError(
                        f"{error}; give the base URL of an OpenAI-compatible server, its --model, and by --api-key-env "
                        "the variable with its key"
                    ) from error
        self._parse(reply)

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Sequence[Answered]:
        """See Server: one request a completion, because servers take ``n`` and a seed together in different ways."""
        answers = []
        for index in range(n):
            reply = await self._client.request("POST", self._path, self._body(prompt, params, seed + index))
            try:
                answers.append(self._parse(reply))
            except ConfigurationError as error:
                raise DependencyLostError(str(error)) from error
        return answers

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.api is Api.CHAT else "/completions"

    def _body(self, prompt: Prompt, params: SamplingParams, seed: int) -> dict[str, Any]:
        messages = [message.model_dump() for message in prompt.messages]
        return {
            "model": self.model,
            **({"messages": messages} if self.api is Api.CHAT else {"prompt": prompt.prompt_ids}),
            self.limit_name: params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"stop": list(params.stop)} if params.stop else {}),
            **({"seed": seed} if self.takes_seeds else {}),
            **({"chat_template_kwargs": self.template_args} if self.template_args and self.api is Api.CHAT else {}),
        }

    async def _check_listed(self) -> None:
        response = await self.http.get(self.probe_path)
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"{self.url} refuses the key: {response.status_code} {response.text[:200]}; --api-key-env names the "
                "variable that has it"
            )
        try:
            listed = [str(entry["id"]) for entry in response.json()["data"]]
        except (json.JSONDecodeError, KeyError, TypeError):
            return  # It has no such route, and the first prompt shows whether it has the model.
        if listed and self.model not in listed:
            raise ConfigurationError(
                f"{self.url} has no model {self.model!r}, but {', '.join(listed)[:300]}; give --model"
            )

    def _adapt_to(self, refusal: RequestRefusedError) -> bool:
        """Change the form of requests if the refusal asks for it; return whether it did."""
        if refusal.status not in (400, 422):
            return False
        if LIMITS[1] in refusal.detail and self.limit_name == LIMITS[0]:
            self.limit_name = LIMITS[1]
        elif "seed" in refusal.detail and self.takes_seeds:
            self.takes_seeds = False
        else:
            return False
        return True

    def _parse(self, response: httpx.Response) -> Answered:
        """Return the completion of a reply.

        Raises:
            ConfigurationError: the reply is none of OpenAI's.
        """
        try:
            reply = _Reply.model_validate_json(response.content)
        except ValidationError as error:
            kind = response.headers.get("content-type", "no content type")
            raise ConfigurationError(
                f"{response.url} answered {response.status_code} with {kind}, which is no completion: "
                f"{response.text[:200]!r}; give --endpoint the base URL of an OpenAI-compatible server, such as "
                "http://127.0.0.1:8000/v1"
            ) from error
        choice, usage = reply.choices[0], reply.usage
        self.counts_tokens &= usage is not None
        text = choice.text if choice.message is None else choice.message.content
        is_cut = choice.finish_reason == FinishReason.LENGTH
        return Answered(
            text or "",
            FinishReason.LENGTH if is_cut else FinishReason.STOP,
            0 if usage is None else usage.prompt_tokens,
            0 if usage is None else usage.completion_tokens,
        )
