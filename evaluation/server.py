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
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import httpx
from pydantic import BaseModel, Field, HttpUrl, TypeAdapter, ValidationError

from evaluation.samples import Kind, Sample
from evaluation.settings import Api, EvaluationSettings
from services.clients.rollout import RolloutClient, SamplingParams, generation_seconds
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason

PROMPT_SECONDS = 600.0
"""The longest time that a prompt may take at one server, unless its completions are long."""
ADMISSION_SECONDS = 30.0
"""Longest time of a server's first prompt, during which the other servers are not probed; it is tried again."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of a completion's length limit in OpenAI's API: of most servers, and of OpenAI's newer models."""
NEUTRAL = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Sampling fields at values without an effect, so that a server does not take those of the model's
generation_config.json; OpenAI's own servers refuse the first three."""
ADMISSION_TRIES = 3 + len(NEUTRAL)
"""Requests that show whether a server needs another name of the limit, and refuses seeds or fields of NEUTRAL."""


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
        raise ConfigurationError(f"{text!r} is not an address; give one such as http://127.0.0.1:30000") from error
    return UrlEndpoint(url.host or "", url.port or 80, base)


def prompt_seconds(settings: EvaluationSettings) -> float:
    """Return the longest time that one prompt may take at one server, by the length of its completions."""
    return max(PROMPT_SECONDS, generation_seconds(settings.max_new_tokens))


class Server(ABC):
    """One server and its work. An async context manager."""

    probe_path: ClassVar[str]
    """The route, below ``url``, whose answers show that the server lives."""
    probe_seconds: ClassVar[float] = 0.0
    """A server that answered within this time is not probed again; 0: it is probed each time."""

    def __init__(self, client: HttpClient) -> None:
        """Make a server that ``client`` reaches, and that is not asked yet."""
        self.client = client
        self.url = client.url
        """Identifies the server, in reports too."""
        self.is_alive = False
        self.is_admitted = False
        self.answered = -1e9
        self.refusals = 0
        self.problem = "not asked yet"
        self.jobs: set[asyncio.Task[Any]] = set()

    @property
    def is_usable(self) -> bool:
        """Return whether the server gets work: it lives, and the last probe could connect."""
        return self.is_alive and not self.refusals

    @property
    def shortcomings(self) -> list[str]:
        """Facts of a report that this kind of server does not give."""
        return []

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter to sample with; None: the model alone."""
        return None

    @property
    def is_due(self) -> bool:
        """Return whether the server must be probed again."""
        return bool(self.refusals) or time.monotonic() - self.answered >= self.probe_seconds

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__()

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
    async def complete(
        self, prompt: Prompt, kind: Kind, indices: Sequence[int], params: SamplingParams, seed: int
    ) -> list[Sample]:
        """Return a sample of the prompt for each of the first indices, as many as the server completed.

        Raises:
            RequestRefusedError: the server refuses the prompt.
            DependencyLostError: the server does not answer.
        """


class RolloutServer(Server):
    """A rollout node, an SGLang, or the router of several, which take token ids by /generate."""

    probe_path = "/health"

    def __init__(self, url: str, settings: EvaluationSettings, model: str, vocab_size: int) -> None:
        """Make a server of ``model``, a hub name or directory; token ids of prompts must be below ``vocab_size``."""
        self.rollouts = RolloutClient(
            parse_url(url),
            settings.token,
            vocab_size=vocab_size,
            model_name=model,
            max_concurrency=settings.eval_concurrency,
            deadline_seconds=prompt_seconds(settings),
            seed_each_completion=settings.engine_deterministic,
        )
        super().__init__(self.rollouts)

    @property
    def adapter(self) -> str | None:
        """See Server."""
        return self.rollouts.lora_path

    async def admit(self) -> None:
        """See Server. A training run's workers serve the trained adapters and the model; the adapters are used."""
        response = await self.client.send_once("GET", "/v1/models", seconds=ADMISSION_SECONDS)
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"{self.url} refuses the token ({response.status_code}); set JOBGROUP_TOKEN to the servers' own"
            )
        await self.rollouts.use_adapter_if_served()

    async def complete(
        self, prompt: Prompt, kind: Kind, indices: Sequence[int], params: SamplingParams, seed: int
    ) -> list[Sample]:
        """See Server: one request for all completions, so that the engine computes the prompt once."""
        started = time.monotonic()
        completions = await self.rollouts.generate(prompt.prompt_ids, params, n=len(indices), seed=seed)
        seconds = time.monotonic() - started
        return [
            Sample.of(
                prompt,
                kind,
                index,
                completion=completion.completion,
                finish_reason=completion.finish_reason,
                prompt_tokens=len(prompt.prompt_ids),
                completion_tokens=completion.tokens,
                policy_version=completion.oldest_version if completion.tokens else None,
                server=self.url,
                seconds=seconds,
            )
            for index, completion in zip(indices, completions, strict=False)
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
        super().__init__(
            HttpClient(
                url, token=key, service="the endpoint", timeout=seconds, deadline=seconds, max_connections=places
            )
        )
        self.model = model
        self.api = api
        self.limit_name = LIMITS[0]
        self.takes_seeds = True
        self.neutral = dict(NEUTRAL)
        self.counts_tokens = True
        self.template_args: Mapping[str, Any] = {}
        """Arguments of the chat template for conversations."""

    @property
    def shortcomings(self) -> list[str]:
        """See Server."""
        seeds = "whether seeds are used" if self.takes_seeds else "samples by seed (it refuses them)"
        refused = [f"a neutral {name} (it refuses the field)" for name in NEUTRAL if name not in self.neutral]
        return ["token ids", seeds, *([] if self.counts_tokens else ["numbers of tokens"]), *refused]

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
                reply = await self.client.request("POST", self._path, body)
                break
            except RequestRefusedError as error:
                if not self._adapt_to(error):
                    raise ConfigurationError(
                        f"{error}; give the base URL of an OpenAI-compatible server, its --model, and by --api-key-env "
                        "the variable with its key"
                    ) from error
        self._parse(reply)

    async def complete(
        self, prompt: Prompt, kind: Kind, indices: Sequence[int], params: SamplingParams, seed: int
    ) -> list[Sample]:
        """See Server: one request a completion, because servers take ``n`` and a seed together in different ways.

        The numbers of tokens are 0 where the server does not count them.
        """
        samples = []
        for place, index in enumerate(indices):
            started = time.monotonic()
            response = await self.client.request("POST", self._path, self._body(prompt, params, seed + place))
            try:
                reply = self._parse(response)
            except ConfigurationError as error:
                raise DependencyLostError(str(error)) from error
            choice, usage = reply.choices[0], reply.usage or _Usage()
            text = choice.text if choice.message is None else choice.message.content
            is_cut = choice.finish_reason == FinishReason.LENGTH
            samples.append(
                Sample.of(
                    prompt,
                    kind,
                    index,
                    completion=text or "",
                    finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    server=self.url,
                    seconds=time.monotonic() - started,
                )
            )
        return samples

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
            **self.neutral,
            **({"stop": list(params.stop)} if params.stop else {}),
            **({"seed": seed} if self.takes_seeds else {}),
            **({"chat_template_kwargs": self.template_args} if self.template_args and self.api is Api.CHAT else {}),
        }

    async def _check_listed(self) -> None:
        response = await self.client.send_once("GET", self.probe_path, seconds=ADMISSION_SECONDS)
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
        elif refused := [name for name in self.neutral if name in refusal.detail]:
            self.neutral = {name: value for name, value in self.neutral.items() if name not in refused}
        else:
            return False
        return True

    def _parse(self, response: httpx.Response) -> _Reply:
        """Return a reply, and note whether it counts tokens.

        Raises:
            ConfigurationError: the reply has another form than OpenAI's.
        """
        try:
            reply = _Reply.model_validate_json(response.content)
        except ValidationError as error:
            kind = response.headers.get("content-type", "no content type")
            raise ConfigurationError(
                f"{response.url} answered {response.status_code} with {kind}, which is not a completion: "
                f"{response.text[:200]!r}; give --endpoint the base URL of an OpenAI-compatible server, such as "
                "http://127.0.0.1:8000/v1"
            ) from error
        self.counts_tokens &= reply.usage is not None
        return reply
