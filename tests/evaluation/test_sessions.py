"""Sessions of several questions: one conversation, a sample and metrics for each question."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from evaluation import report
from evaluation.checkpoints import Checkpoint
from evaluation.evaluation import AgentWorkflow, Evaluation
from evaluation.metrics import GREEDY
from evaluation.samples import Kind, SampleStore, open_store
from evaluation.server import RolloutServer
from evaluation.settings import EvaluationSettings
from services.core.errors import ConfigurationError
from services.protocol.prompts import Prompt
from tests.evaluation.chat_model import Model, call, score

PROMPTS = [Prompt(id=str(n), prompt=f"What is {n} + 1?", ground_truth=str(n + 1)) for n in range(5)]
SETTINGS = EvaluationSettings(agent="my_agent:solve", eval_session_questions=2)


class Pool:
    """A pool of one server."""

    alive = True

    def __init__(self, model: Model) -> None:
        self.server = RolloutServer("http://server", SETTINGS, "model", 17)
        self.server.http = httpx.AsyncClient(transport=httpx.ASGITransport(model.app), base_url="http://server")

    async def run(self, work: Any) -> Any:
        return await work(self.server)


async def solve(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = [*example.history, {"role": "user", "content": example.prompt}]
    reply = await client.chat.completions.create(model=example.model, messages=messages)
    return await example.score(reply.choices[0].message.content)


async def forgetful(example: Any, **given: Any) -> Any:
    example.history = []
    return await solve(example, **given)


async def evaluate(model: Model, store: SampleStore, agent: Any = solve, prompts: Any = PROMPTS) -> Evaluation:
    pool: Any = Pool(model)
    workflow = AgentWorkflow(agent, SETTINGS, score, "m", asyncio.Semaphore(1))
    evaluation = Evaluation(prompts, 0, workflow, pool, score, store, SETTINGS.eval_session_questions)
    await evaluation.run()
    await pool.server.http.aclose()
    return evaluation


@pytest.fixture(autouse=True)
def _one_session_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.evaluation.WINDOW", 1)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path, {}) as opened:
        yield opened


def conversations(model: Model) -> list[list[str]]:
    """Return the contents of the messages that the model was asked with."""
    return [[message["content"] for message in asked["messages"]] for asked in model.asked]


async def test_a_question_continues_the_conversation_over_those_before_it(store: SampleStore) -> None:
    model = Model(*({"content": answer} for answer in ("1", "wrong", "3", "wrong", "5")))
    await evaluate(model, store)
    questions = [prompt.prompt for prompt in PROMPTS]
    assert conversations(model) == [
        [questions[0]],
        [questions[0], "1", questions[1]],
        [questions[2]],
        [questions[2], "3", questions[3]],
        [questions[4]],
    ]
    given: dict[str, Any] = {"left_out": {}, "identity": {}, "dataset": "d"}
    results = report.results_of(Checkpoint("m", "org/m"), PROMPTS, store.samples, SETTINGS, **given)
    by_place = {place: (m[GREEDY].value, m[GREEDY].prompts) for place, m in results.questions.items()}
    assert by_place == {"1": (1.0, 3), "2": (0.0, 2)}
    assert [store.samples[prompt.id, Kind.GREEDY, 0].turns for prompt in PROMPTS] == [1] * 5


async def test_a_killed_session_goes_on_with_the_conversation_that_was_stored(store: SampleStore) -> None:
    await evaluate(Model({"content": "1"}), store, prompts=PROMPTS[:1])
    model = Model({"content": "2"})
    await evaluate(model, store, prompts=PROMPTS[:2])
    assert conversations(model) == [[PROMPTS[0].prompt, "1", PROMPTS[1].prompt]]


async def test_a_question_that_fails_is_left_out_and_its_session_goes_on(store: SampleStore) -> None:
    model = Model({"content": "1"}, 400, {"content": "3"}, {"content": "4"})
    evaluation = await evaluate(model, store, prompts=PROMPTS[:4])
    assert evaluation.progress.left_out == {"agent failed": 1}
    assert conversations(model)[-1] == [PROMPTS[2].prompt, "3", PROMPTS[3].prompt]


async def test_an_agent_that_drops_the_history_is_told_so(store: SampleStore) -> None:
    evaluation = await evaluate(Model(*[{"content": "1"}] * 5), store, forgetful)
    assert evaluation.progress.left_out == {"agent failed": 2}
    assert "begin with example.history" in evaluation.progress.examples["agent failed"]


async def test_an_agent_of_another_api_ends_the_evaluation_at_its_first_call(store: SampleStore) -> None:
    async def respond(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        await client.responses.create(model=example.model, input=example.prompt)
        return 1.0

    with pytest.raises(ConfigurationError, match=r"/v1/responses: .* Have the agent ask for chat completions"):
        await evaluate(Model(), store, respond)
    assert store.samples == {}


async def test_the_math_agent_keeps_its_tools_results(math_agent: Any, store: SampleStore) -> None:
    model = Model(call("add", '{"a": 0, "b": 1}'), {"content": "1"}, {"content": "2"})
    await evaluate(model, store, math_agent.solve, PROMPTS[:2])
    *_, last = model.asked
    assert [message["role"] for message in last["messages"]].count("system") == 1
    tail = last["messages"][-5:]
    assert [m["role"] for m in tail] == ["user", "assistant", "tool", "assistant", "user"]
    assert (tail[1]["tool_calls"][0]["function"]["name"], tail[2]["content"]) == ("add", "1")


def test_single_completions_have_no_sessions() -> None:
    with pytest.raises(ValueError, match="EVAL_SESSION_QUESTIONS is for agents"):
        EvaluationSettings(eval_session_questions=2)
