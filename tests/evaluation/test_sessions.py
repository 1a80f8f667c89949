"""Sessions of several questions: one conversation, a sample and metrics for each question."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from evaluation import report
from evaluation.checkpoints import Checkpoint
from evaluation.evaluation import Evaluation
from evaluation.settings import EvaluationSettings
from evaluation.store import Kind, SampleStore, open_store
from services.protocol.prompts import Prompt
from services.protocol.rewards import GREEDY
from tests.evaluation.agent_play import Ground, call

PROMPTS = [Prompt(id=str(n), prompt=f"What is {n} + 1?", ground_truth=str(n + 1)) for n in range(5)]
SETTINGS = EvaluationSettings(agent="my_agent:solve", eval_session_questions=2)


async def solve(example: Any, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = [*example.history, {"role": "user", "content": example.prompt}]
    reply = await client.chat.completions.create(model=example.model, messages=messages)
    return await example.score(reply.choices[0].message.content)


async def forgetful(example: Any, **given: Any) -> Any:
    example.history = []
    return await solve(example, **given)


async def evaluate(
    ground: Ground, says: list[str], store: SampleStore, agent: Any = solve, prompts: Any = PROMPTS
) -> Evaluation:
    ground.engine.says = says
    ground.engine.requests.clear()
    workflow = ground.workflow(agent, SETTINGS)

    async def is_healthy() -> bool:
        return True

    evaluation = Evaluation(prompts, 0, workflow, store, is_healthy, SETTINGS.eval_session_questions)
    await evaluation.run()
    return evaluation


@pytest.fixture(autouse=True)
def _one_session_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.evaluation.WINDOW", 1)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path, {}) as opened:
        yield opened


def conversations(ground: Ground) -> list[list[str]]:
    """Return the contents of the messages that the model was asked with, without the template's system turn."""
    turn = re.compile(r"<\|im_start\|>(?:user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)
    return [turn.findall(text) for text in ground.engine.asked]


async def test_a_question_continues_the_conversation_over_those_before_it(ground: Ground, store: SampleStore) -> None:
    await evaluate(ground, ["1", "wrong", "3", "wrong", "5"], store)
    questions = [prompt.prompt for prompt in PROMPTS]
    assert conversations(ground) == [
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


async def test_a_killed_session_goes_on_with_the_conversation_that_was_stored(
    ground: Ground, store: SampleStore
) -> None:
    await evaluate(ground, ["1"], store, prompts=PROMPTS[:1])
    await evaluate(ground, ["2"], store, prompts=PROMPTS[:2])
    assert conversations(ground) == [[PROMPTS[0].prompt, "1", PROMPTS[1].prompt]]


async def test_a_question_that_fails_is_left_out_and_its_session_goes_on(ground: Ground, store: SampleStore) -> None:
    ground.engine.troubles = [None, 400]
    evaluation = await evaluate(ground, ["1", "3", "4"], store, prompts=PROMPTS[:4])
    assert evaluation.progress.left_out == {"agent failed": 1}
    assert conversations(ground)[-1] == [PROMPTS[2].prompt, "3", PROMPTS[3].prompt]


async def test_an_agent_that_drops_the_history_is_told_so(ground: Ground, store: SampleStore) -> None:
    evaluation = await evaluate(ground, ["1"] * 5, store, forgetful)
    assert evaluation.progress.left_out == {"agent failed": 2}
    assert "begin with example.history" in evaluation.progress.examples["agent failed"]


async def test_the_math_agent_keeps_its_tools_results(math_agent: Any, ground: Ground, store: SampleStore) -> None:
    await evaluate(ground, [call("add", '{"a": 0, "b": 1}'), "1", "2"], store, math_agent.solve, PROMPTS[:2])
    messages = store.samples[PROMPTS[1].id, Kind.GREEDY, 0].messages
    assert messages is not None
    assert [message["role"] for message in messages].count("system") == 1
    tail = messages[-6:]
    assert [m["role"] for m in tail] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert (tail[1]["tool_calls"][0]["function"]["name"], tail[2]["content"]) == ("add", "1")


def test_single_completions_have_no_sessions() -> None:
    with pytest.raises(ValueError, match="EVAL_SESSION_QUESTIONS is for agents"):
        EvaluationSettings(eval_session_questions=2)
