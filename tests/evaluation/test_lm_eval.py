"""lm-eval, by its own client, and our evaluation read the same answers of the same engine to the same questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import Results
from tests.waiting import LIMIT_SECONDS

pytestmark = pytest.mark.oracles

QUESTIONS = [(a, b) for a in range(1, 10) for b in range(1, 10)][:60]
TASK = """
task: additions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["~"], do_sample: false, temperature: 0.0, max_gen_toks: 4}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def answers_of_lm_eval(engine: str, model: Path, questions: Path, directory: Path) -> tuple[dict[str, str], float]:
    """Return lm-eval's extracted answer by question, and its accuracy."""
    (directory / "additions.yaml").write_text(TASK.format(path=questions))
    url = f"model={model},base_url={engine}/v1/chat/completions,num_concurrent=4,tokenizer_backend=None"
    options = ("--model", "local-chat-completions", "--model_args", url, "--tasks", "additions")
    where = ("--include_path", str(directory), "--output_path", str(directory / "out"), "--log_samples")
    subprocess.run(
        [sys.executable, "-m", "lm_eval", *options, *where, "--apply_chat_template"],
        check=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "HF_HOME": str(directory / "hub"), "OPENAI_API_KEY": "none"},
    )
    [samples] = (directory / "out").rglob("samples_*.jsonl")
    [results] = (directory / "out").rglob("results_*.json")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    accuracy = json.loads(results.read_text())["results"]["additions"]["exact_match,number"]
    return {line["doc"]["question"]: line["filtered_resps"][0] for line in lines}, accuracy


def test_both_extract_the_same_answers(evaluate: Any, engine: str, tiny_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in QUESTIONS]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs, accuracy = answers_of_lm_eval(engine, tiny_model, questions, tmp_path)
    own = ("--model", tiny_model, "--endpoint", f"{engine}/v1", "--dataset", questions, "--split", "all")
    command = evaluate(*own, "--max-new-tokens", "4", INSTRUCTION="none", REWARD_FN="exact_match")
    results = Results.model_validate(command.succeed())
    ours = {sample["prompt"]: sample["result"]["extracted"] for sample in command.samples()}
    assert ours.keys() == theirs.keys()
    assert len(ours) == 60
    assert {question: answer or "[invalid]" for question, answer in ours.items()} == theirs
    assert results.metrics["greedy pass@1"].value == pytest.approx(accuracy)
    assert 0.2 < accuracy < 1
