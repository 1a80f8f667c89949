"""Any server that speaks OpenAI's API, the second kind of an evaluation's servers.

Such a server takes conversations by /chat/completions and renders them itself, or token ids by /completions. It gives
texts, no token ids, and need not say whether it uses a seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx
from pydantic import BaseModel, Field, ValidationError

from evaluation.server import LIMITS, PROMPT_SECONDS, Answered, Server
from evaluation.settings import Api
from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason

ADMISSION_TRIES = 3
"""Requests by which a server may be found to need another name of the limit, and no seed."""


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
