"""lm-eval, by its own client and its own GSM8K task, and our evaluation read the same answers of the same engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.metrics import Results
from services.embedded_engine.app import create_app
from services.engines.settings import RolloutSettings
from tests.evaluation.gsm8k_rows import COUNTS, ROWS
from tests.services.run_page.serving import served_ready
from tests.waiting import LIMIT_SECONDS

# On one core without bfloat16 instructions the two take seven minutes.
pytestmark = [pytest.mark.oracles, pytest.mark.timeout(6 * LIMIT_SECONDS)]

MODEL = Path(__file__).parents[2] / ".cache/models/smollm2-135m"
STOP = "Question:"
MAX_TOKENS = 112
TASK = """
include: {task}
task: gsm8k_rows
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {rows}/train.jsonl, test: {rows}/test.jsonl}}}}
num_fewshot: {examples}
fewshot_config: {{sampler: first_n}}
generation_kwargs: {{until: ["{stop}"], do_sample: false, temperature: 0.0, max_gen_toks: {tokens}}}
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The URL of an embedded engine with a language model."""
    assert MODEL.exists(), f"{MODEL} is missing; run make {MODEL.relative_to(Path(__file__).parents[2])}/config.json"
    with served_ready(create_app(RolloutSettings(model_name=str(MODEL), engine_dtype="float32"))) as url:
        yield url


def samples_of_lm_eval(engine: str, directory: Path) -> list[dict[str, Any]]:
    """Return lm-eval's record of each question, read as its filter ``flexible-extract`` reads it: the last number."""
    package = importlib.util.find_spec("lm_eval")
    assert package is not None
    assert package.origin is not None
    task = Path(package.origin).parent / "tasks/gsm8k/gsm8k.yaml"
    filled = TASK.format(task=task, rows=ROWS, examples=COUNTS["train"], stop=STOP, tokens=MAX_TOKENS)
    (directory / "gsm8k_rows.yaml").write_text(filled)
    url = f"model={MODEL},base_url={engine}/v1/chat/completions,num_concurrent=8,tokenizer_backend=None"
    options = ("--model", "local-chat-completions", "--model_args", url, "--tasks", "gsm8k_rows")
    where = ("--include_path", str(directory), "--output_path", str(directory / "out"), "--log_samples")
    subprocess.run(
        [sys.executable, "-m", "lm_eval", *options, *where, "--apply_chat_template", "--fewshot_as_multiturn", "false"],
        check=True,
        timeout=3 * LIMIT_SECONDS,
        env={**os.environ, "HF_HOME": str(directory / "hub"), "OPENAI_API_KEY": "none"},
    )
    [samples] = (directory / "out").rglob("samples_*.jsonl")
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    return [record for record in records if record["filter"] == "flexible-extract"]


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROWS / f"{split}.jsonl").read_text().splitlines()]


def prompts() -> dict[str, str]:
    """Return each question's prompt with examples before it."""
    examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows("train"))
    return {row["question"]: f"{examples}Question: {row['question']}\nAnswer:" for row in rows("test")}


def number(answer: str | None) -> str:
    """Return an answer without the signs that lm-eval's filter keeps and ours drops, or the other way round."""
    return (answer or "").replace("$", "").replace(",", "").rstrip(".")


def test_the_evaluation_and_lm_eval_extract_the_same_answers(evaluate: Any, engine: str, tmp_path: Path) -> None:
    theirs = {record["doc"]["question"]: record for record in samples_of_lm_eval(engine, tmp_path)}
    asked = prompts()
    assert theirs.keys() == asked.keys()
    for question, record in theirs.items():
        [[message]] = [json.loads(text) for text in record["arguments"]["gen_args_0"]["arg_0"]]
        assert message["content"] == asked[question]

    questions = tmp_path / "questions.jsonl"
    answers = {row["question"]: row["answer"] for row in rows("test")}
    lines = [{"question": prompt, "answer": answers[question]} for question, prompt in asked.items()]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ("--model", MODEL, "--endpoint", f"{engine}/v1", "--dataset", questions, "--split", "all", "--stop", STOP)
    command = evaluate(*own, "--max-new-tokens", str(MAX_TOKENS), INSTRUCTION="none", MAX_PROMPT_TOKENS="2048")
    results = Results.model_validate(command.succeed())
    ours = {sample["prompt"]: sample for sample in command.samples()}
    assert len(ours) == COUNTS["test"]
    assert results.left_out == {}

    whole = 0
    for question, record in theirs.items():
        sample = ours[asked[question]]
        assert sample["completion"] == record["resps"][0][0]
        # The last number of a text that was cut need not be its answer, so ours may read none.
        if sample["finish_reason"] == "stop":
            whole += 1
            assert number(sample["result"]["extracted"]) == number(record["filtered_resps"][0])
            assert sample["result"]["reward"] == record["exact_match"]
    assert whole >= COUNTS["test"] / 2
