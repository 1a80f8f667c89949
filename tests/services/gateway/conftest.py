"""Fixtures of the gateway's tests: small models with the chat templates of well-known ones, and a gateway on them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.models import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from services.core.endpoints import ENDPOINTS_VARIABLE
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fake_engine import FakeEngine, running

TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = {
    "qwen2.5": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "smollm2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "demo": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "gemma4": ("<bos>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"),
    "llama3": ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""The special tokens by model; the last one ends a turn."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def make_model(directory: Path, name: str) -> Path:
    """Write a byte-level BPE tokenizer with merges, ``name``'s special tokens and chat template, and a config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = (CHAT_TEMPLATE if name == "demo" else TEMPLATES / f"{name}.jinja").read_text()
    specials = SPECIALS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Line breaks before and after words, so that merges reach across the boundaries of turns where nothing stops them.
    tokenizer.train_from_iterator([template.replace("\\n", "\n"), "user\nassistant\n\nanswer\n\n" * 50], trainer)
    if name not in ("llama3", "harmony", "gemma4"):
        tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1], pad_token=specials[0])
    fast.chat_template = template
    if name == "demo":
        fast.response_template = json.loads(RESPONSE_TEMPLATE.read_text())
    fast.save_pretrained(directory)
    config = {"model_type": "qwen2", "vocab_size": len(fast), "max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model by the name of its template."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@dataclass
class Running:
    """A gateway in this process, in front of a fake engine."""

    client: httpx.AsyncClient
    engine: FakeEngine
    tokenizer: Any
    answers: list[str]
    """The texts with which the engine answers the next requests; the last one stays."""

    async def open(self, session: str = "s", **limits: Any) -> str:
        """Open a session and return the path of its chat completions."""
        reply = await self.client.post("/sessions", json={"id": session, **limits})
        assert reply.status_code == 200, reply.text
        return f"/sessions/{session}/v1/chat/completions"

    async def finish(self, session: str = "s") -> dict[str, Any]:
        reply = await self.client.post(f"/sessions/{session}/finish")
        assert reply.status_code == 200, reply.text
        trace: dict[str, Any] = reply.json()
        return trace

    async def chat(self, path: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the reply's first message."""
        reply = await self.client.post(path, json={"messages": messages, "model": "m", **fields})
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message

    def whole(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation that is rendered as a whole."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


StartGateway = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def gateway(
    models: Callable[[str], Path], serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StartGateway:
    """``async with gateway(name, answers=[...]) as running``: a gateway with that model's template."""

    @asynccontextmanager
    async def start(
        model: str | Path = "qwen2.5", *, answers: list[str], token: str | None = None, **settings: Any
    ) -> AsyncIterator[Running]:
        from transformers import AutoTokenizer

        directory = models(model) if isinstance(model, str) else model
        tokenizer = AutoTokenizer.from_pretrained(directory)
        texts = list(answers)

        def answer(_request: dict[str, Any]) -> list[int]:
            text = texts.pop(0) if len(texts) > 1 else texts[0]
            ids = tokenizer.encode(text, add_special_tokens=False)
            has_end = ids and tokenizer.decode(ids[-1:]) in ("<|call|>", "<|return|>")
            return [*ids, *([] if has_end else [tokenizer.eos_token_id])]

        async with running(FakeEngine(answer)) as engine:
            monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({"rollout-server-0:30000": f"127.0.0.1:{engine.port}"}))
            made = GatewaySettings(
                model_name=str(directory), gateway_dir=tmp_path / "gateway", jobgroup_token=token, **settings
            )
            async with serving(create_app(made), token=token) as client:
                yield Running(client, engine, tokenizer, texts)

    return start
