"""A model that answers a person's lines, by the embedded engine in this process."""

from __future__ import annotations

from typing import Any

from services.embedded_engine.compute.engine import Engine
from services.embedded_engine.compute.loading import load
from services.embedded_engine.http.requests import ChatRequest, CompletionRequest, OpenAIRequest, make_request
from services.embedded_engine.http.sglang_routes import completion_text
from services.engines.settings import EngineSettings
from services.http.problems import ProblemError

CONTEXT_TOKENS = 8192
"""The most tokens of a conversation; each engine has a cache of this size."""


class ChatModel:
    """A model with an engine of its own, and its side of the conversation."""

    def __init__(self, model: str, data: dict[str, Any]) -> None:
        """Load a model.

        Args:
            model: a hub name or directory.
            data: the settings of the run's data-server.

        Raises:
            ConfigurationError: the model cannot be loaded.
        """
        settings = EngineSettings.load(
            model_name=model, engine_max_running_requests=1, engine_max_total_tokens=CONTEXT_TOKENS
        )
        self._loaded = load(settings)
        self._is_chat = bool(self._loaded.tokenizer.chat_template) and data.get("prompt_style") != "plain"
        self._template_args = data.get("chat_template_args") or {}
        system = data.get("system_prompt")
        self.messages = [{"role": "system", "content": system}] if system else []
        """The conversation so far."""
        self._engine = Engine(self._loaded, on_failure=lambda _: None)
        self._engine.start()

    def answer(self, line: str, max_new_tokens: int, temperature: float) -> str:
        """Return the answer to a line, or the engine's refusal, such as of a conversation that is too long."""
        options = {"max_tokens": max_new_tokens, "temperature": temperature}
        turn = {"role": "user", "content": line}
        body: OpenAIRequest
        try:
            if self._is_chat:
                chat = {"messages": [*self.messages, turn], "chat_template_kwargs": self._template_args}
                body = conversation = ChatRequest.model_validate(options | chat)
                ids = conversation.prompt_ids(self._loaded.tokenizer)
            else:
                body = CompletionRequest.model_validate(options | {"prompt": line})
                ids = self._loaded.encode(line)
            request = make_request(ids, body, self._loaded)
        except ProblemError as error:
            return f"error: {error.detail}"
        self._engine.submit(request)
        answer = completion_text(request.done.result().sequences[0], self._loaded)
        if self._is_chat:
            self.messages += [turn, {"role": "assistant", "content": answer}]
        return answer
