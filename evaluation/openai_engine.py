"""Any server that speaks OpenAI's API, as the engine of an evaluation.

It takes conversations by /chat/completions and renders them itself, or token ids by /completions. It gives texts, no
token ids, and need not say whether it uses a seed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from services.clients.rollout import SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.groups import TokenSequence
from services.protocol.prompts import Message, Prompt
from services.protocol.rewards import FinishReason

LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of a completion's length limit in OpenAI's API: of most servers, and of OpenAI's newer models."""
NEUTRAL = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Sampling fields at values without an effect, so that a server does not take those of the model's
generation_config.json; OpenAI's own servers refuse the first three."""
ADMISSION_TRIES = 4
"""Requests that show whether a server needs another name of the limit, and refuses seeds or fields of NEUTRAL."""
PROBE_SECONDS = 30.0


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: dict[str, Any] | None = None


class OpenAIEngine(HttpClient):
    """A server of OpenAI's routes below ``url``, such as ``https://host/v1``. An async context manager."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        *,
        is_chat: bool,
        places: int,
        seconds: float,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Make an engine of ``model``, by its name there.

        Args:
            url: the base URL of its OpenAI routes.
            model: the model's name in requests.
            key: the API key.
            is_chat: ask by /chat/completions, else by /completions, for which prompts need token ids.
            places: requests in flight.
            seconds: the longest time that one completion may take, with all tries.
            template_args: arguments of the chat template for conversations.
        """
        super().__init__(url, token=key, service="the endpoint", timeout=seconds, deadline=seconds)
        self.model = model
        self.is_chat = is_chat
        self._path = "/chat/completions" if is_chat else "/completions"
        self.limit_name = LIMITS[0]
        self.takes_seeds = True
        self.neutral: Mapping[str, int] = NEUTRAL
        self.counts_tokens = True
        self._places = asyncio.Semaphore(places)
        self._template_args = dict(template_args or {})

    @property
    def shortcomings(self) -> list[str]:
        """The facts of a report that this server does not give."""
        seeds = "whether seeds are used" if self.takes_seeds else "samples by seed (it refuses them)"
        refused = [] if self.neutral else [f"neutral {', '.join(NEUTRAL)} (it refuses one)"]
        return ["token ids", seeds, *([] if self.counts_tokens else ["numbers of tokens"]), *refused]

    async def is_healthy(self) -> bool:
        """Return whether any answer comes but those of a proxy without a server; a server need not have the route."""
        try:
            return (await self.send_once("GET", "/models", seconds=PROBE_SECONDS)).status_code not in (502, 503, 504)
        except DependencyLostError:
            return False

    async def admit(self, seconds: float) -> None:
        """Wait ``seconds`` for the server, and check that it lists the model and answers; learn the fields it refuses.

        Raises:
            ConfigurationError: it does not.
            DependencyLostError: it does not answer in time.
        """
        await self._check_listed(seconds)
        probe = Prompt(id="", prompt="", ground_truth="", prompt_ids=[1], messages=[Message(role="user", content="1")])
        for _ in range(ADMISSION_TRIES):
            try:
                reply = await self.request("POST", self._path, self._body(probe, SamplingParams(1), 0))
                break
            except RequestRefusedError as error:
                if not self._adapt_to(error):
                    raise ConfigurationError(
                        f"{error}; give the base URL of an OpenAI-compatible server, its --model and --api-key-env"
                    ) from error
        self._parse(reply)

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[TokenSequence]:
        """Return ``n`` completions: one request each, because servers take ``n`` and a seed together in different ways.

        Their token ids are 0, as many as the server counts; none where it does not count them.

        Raises:
            RequestRefusedError: the server refuses the prompt.
            DependencyLostError: the server does not answer, or answers with something else.
        """
        return await asyncio.gather(*(self._complete(prompt, params, seed + i) for i in range(n)))

    async def _complete(self, prompt: Prompt, params: SamplingParams, seed: int) -> TokenSequence:
        async with self._places:
            response = await self.request("POST", self._path, self._body(prompt, params, seed))
        try:
            reply = self._parse(response)
        except ConfigurationError as error:
            raise DependencyLostError(str(error)) from error
        choice, tokens = reply.choices[0], int((reply.usage or {}).get("completion_tokens", 0))
        text = choice.text if choice.message is None else choice.message.content
        is_cut = choice.finish_reason == FinishReason.LENGTH
        return TokenSequence(
            completion=text or "",
            completion_ids=np.zeros(tokens, np.int32),
            logprobs=np.zeros(tokens),
            policy_versions=np.zeros(tokens, np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )

    def _body(self, prompt: Prompt, params: SamplingParams, seed: int) -> dict[str, Any]:
        messages = [message.model_dump() for message in prompt.messages]
        return {
            "model": self.model,
            **({"messages": messages} if self.is_chat else {"prompt": prompt.prompt_ids}),
            self.limit_name: params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **self.neutral,
            **({"stop": list(params.stop)} if params.stop else {}),
            # Some servers take no more than 31 bits.
            **({"seed": seed % 2**31} if self.takes_seeds else {}),
            **({"chat_template_kwargs": self._template_args} if self._template_args and self.is_chat else {}),
        }

    async def _check_listed(self, seconds: float) -> None:
        try:
            reply = await self.request("GET", "/models", deadline=seconds)
            listed = [str(entry["id"]) for entry in reply.json()["data"]]
        except RequestRefusedError as error:
            if error.status in (401, 403):
                raise ConfigurationError(f"{error}; --api-key-env names the variable with the key") from error
            return  # It has no such route, and the first prompt shows whether it has the model.
        except (json.JSONDecodeError, KeyError, TypeError):
            return
        if listed and self.model not in listed:
            has = ", ".join(listed)[:300]
            raise ConfigurationError(f"{self.url} has no model {self.model!r}, but {has}; give --model")

    def _adapt_to(self, refusal: RequestRefusedError) -> bool:
        """Change the form of requests if the refusal asks for it; return whether it did."""
        if refusal.status not in (400, 422):
            return False
        if LIMITS[1] in refusal.detail and self.limit_name == LIMITS[0]:
            self.limit_name = LIMITS[1]
        elif "seed" in refusal.detail and self.takes_seeds:
            self.takes_seeds = False
        elif any(name in refusal.detail for name in self.neutral):
            self.neutral = {}
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
            answer = f"{response.url} answered {response.status_code} with {kind}, which is not a completion"
            raise ConfigurationError(
                f"{answer}: {response.text[:200]!r}; give --endpoint a base URL, such as http://127.0.0.1:8000/v1"
            ) from error
        self.counts_tokens &= reply.usage is not None
        return reply
