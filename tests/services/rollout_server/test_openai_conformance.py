"""OpenAI's chat completions: the same tests against the embedded engine and the real SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS

QUESTION = [{"role": "user", "content": "3+4="}]


@pytest.fixture
def client(server: Nodes) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.router.url + "/v1", api_key=TOKEN, timeout=IDLE_SECONDS, max_retries=0) as made:
        yield made


def model_of(server: Nodes) -> str:
    return str(server.model)


def test_a_chat_completion_is_whole(client: openai.OpenAI, server: Nodes) -> None:
    reply = client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=0)
    assert reply.object == "chat.completion"
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 4
    assert reply.usage.total_tokens == 4 + reply.usage.completion_tokens


def test_several_chat_completions_come_with_their_places(client: openai.OpenAI, server: Nodes) -> None:
    reply = client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=1, n=3)
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, server: Nodes) -> None:
    def answer(**options: Any) -> Any:
        create = client.chat.completions.create
        return create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=0, **options).choices[0]

    text = answer().message.content
    assert text
    cut = answer(stop=text[-1])
    assert (cut.message.content or "", cut.finish_reason) == (text[: text.index(text[-1])], "stop")


def test_the_models_are_listed_and_what_cannot_be_done_or_has_a_wrong_key_is_refused(
    client: openai.OpenAI, server: Nodes
) -> None:
    assert model_of(server) in [model.id for model in client.models.list()]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model_of(server), messages=QUESTION, max_tokens=4, temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model=model_of(server), messages=QUESTION)
