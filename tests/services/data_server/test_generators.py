from __future__ import annotations

import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.dataset import load as load_dataset
from services.data_server.generators import ARITHMETIC_HELD_OUT_SHARE, arithmetic_questions
from services.data_server.reasoning_questions import Plan, PlanError, Question, questions
from services.data_server.settings import DataSettings
from services.protocol.ground_truths import Entry

TEMPLATE = "What is {a} {op} {b}? Answer with just the number."


def make(digits: list[int], operations: str, seed: int = 0) -> tuple[list[tuple[int, str, int, str]], ...]:
    sides = arithmetic_questions(digits=digits, operations=operations, template=TEMPLATE, seed=seed)
    parsed = []
    for side in sides:
        found = [(re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\? .*", q.question), q.answer) for q in side]
        parsed.append([(int(m[1]), m[2], int(m[3]), answer) for m, answer in found if m])
        assert len(parsed[-1]) == len(side)
    return tuple(parsed)


@pytest.mark.parametrize(("digits", "operations"), [([1], "+"), ([2], "*"), ([1, 2], "+-*")])
def test_answers_are_right_and_no_held_out_question_is_a_training_question_turned_round(
    digits: list[int], operations: str
) -> None:
    train, held_out = make(digits, operations)
    for a, op, b, answer in train + held_out:
        assert str({"+": a + b, "-": a - b, "*": a * b}[op]) == answer
        assert len(str(a)) in digits
        assert len(str(b)) in digits
        assert not answer.startswith("-")
    pairs = [{(op, *sorted((a, b))) for a, op, b, _ in side} for side in (train, held_out)]
    assert pairs[0].isdisjoint(pairs[1])
    assert len(pairs[1]) == pytest.approx(ARITHMETIC_HELD_OUT_SHARE * len(pairs[0] | pairs[1]), rel=0.1)


def test_seeds_are_digits_and_held_out_ones_are_others() -> None:
    source = dataset_rows.load(DataSettings(dataset="seeds"))
    train, test = (
        {row.ground_truth for row in rows.take(list(range(len(rows))))} for rows in (source.train, source.test)
    )
    assert (len(train), len(test)) == (10_000, 1_000)
    assert all(seed.isdecimal() for seed in train | test)
    assert not train & test
    assert source.instruction is None


pytest.importorskip("reasoning_gym", reason="no reasoning-gym, which needs a C compiler")


def load(dataset: str, config: str | None = None, **options: Any) -> dataset_rows.DatasetRows:
    return dataset_rows.load(DataSettings(dataset=dataset, dataset_config=config, **options))


def plan(generator: str, size: int = 40, levels: list[int] | None = None) -> Plan:
    return Plan(generator=generator, size=size, levels=levels, parameters={}, seed=0)


def made(plan: Plan) -> list[Question]:
    found = list(questions(plan))
    assert all(isinstance(question, Question) for question in found), found
    return [question for question in found if isinstance(question, Question)]


def test_held_out_questions_are_distinct_and_none_is_a_training_question() -> None:
    # One-digit sums of two terms: 200 at most, so that 1000 draws repeat most of them.
    config = '{"chain_sum": {"max_terms": 2, "max_digits": 1}}'
    source = load("reasoning_gym:chain_sum", config, dataset_held_out=0.2)
    train, test = (rows.take(list(range(len(rows)))) for rows in (source.train, source.test))
    held_out = [row.question for row in test]
    assert len(set(held_out)) == len(held_out) >= 30
    assert len({row.question for row in train}) < len(train)
    assert not {row.question for row in train} & set(held_out)
    assert source.instruction is not None
    assert "<answer>" in source.instruction
    row = train[0]
    assert row.answer == f"<answer>{Entry.from_json(row.ground_truth).content['answer']}</answer>"
    assert row.category == "chain_sum"


def test_levels_have_equal_parts_and_ascend() -> None:
    found = made(plan("chain_sum", size=60, levels=[2, 0]))
    assert [q.category for q in found] == ["chain_sum 0"] * 30 + ["chain_sum 2"] * 30
    hard = Entry.from_json(next(q.ground_truth for q in found if q.category == "chain_sum 2"))
    assert hard.content["metadata"]["difficulty"] == {"num_terms": (4, 4), "num_digits": (3, 3)}
    # What the scoring may read of the level's parameters.
    assert hard.parameters == {"min_terms": 4, "max_terms": 4, "min_digits": 3, "max_digits": 3}


def test_questions_are_the_same_on_every_day() -> None:
    entries = [q.ground_truth for q in made(plan("time_intervals"))]
    assert any("2000-01-01" in entry for entry in entries)
    assert not any(datetime.date.today().isoformat() in entry for entry in entries)


def test_a_wrong_setting_is_refused_before_anything_is_generated() -> None:
    for dataset, config, named in (
        ("chain_sum=0", None, "'chain_sum=0'"),
        ("chain_sum,gcd", None, "SOURCES"),
        ("", None, "reasoning_gym:NAME"),
        ("chain_sum", "main", "DATASET_CONFIG 'main'"),
        ("chain_sum", '{"size": "many"}', "size: "),
        ("chain_sum", '{"levels": [-1]}', r"levels\.0: "),
        ("chain_sum", '{"max_terms": 3}', "max_terms"),
        ("chain_sm", None, "'chain_sm'; close are chain_sum"),
    ):
        with pytest.raises(ConfigurationError, match=named) as error:
            load(f"reasoning_gym:{dataset}", config)
        assert "\n" not in str(error.value)
    for parameters, named in (
        ({"chain_sum": {"words": 3}}, "'words'.*max_terms"),
        ({"chain_sum": {"min_terms": 0}}, "min_terms"),
        ({"chain_sum": {"size": 5}}, "size"),
        ({"lcm": {}}, "lcm"),
    ):
        with pytest.raises(PlanError, match=named):
            list(questions(Plan("chain_sum", 10, None, parameters, 0)))


def test_a_question_that_cannot_be_made_or_written_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    original = ChainSumDataset.__getitem__

    def moody(self: Any, index: int) -> dict[str, Any]:
        if index == 3:
            raise RuntimeError("no puzzle found")
        found = original(self, index)
        return found | {"metadata": {"thing": object()}} if index == 5 else found

    monkeypatch.setattr(ChainSumDataset, "__getitem__", moody)
    found = list(questions(plan("chain_sum", size=10)))
    assert [text for text in found if isinstance(text, str)] == [
        "chain_sum: RuntimeError: no puzzle found",
        "chain_sum: TypeError: object has no form in JSON",
    ]
    assert len(found) == 10


def test_a_generator_that_dies_is_one_line_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    # More than a pipe holds, so that nobody reads the end of it.
    config = json.dumps({"chain_sum": {"words": "a" * 2**20}})
    # Before it reads its plan, and within a line.
    for script, end in (
        ("exec 0<&-; exit 3", "exited with code 3"),
        ("""cat >/dev/null; printf '{"question": "a'; kill -9 $$""", "was ended by SIGKILL"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(ConfigurationError, match=end):
            load("reasoning_gym:chain_sum", config)


def test_few_shot_needs_a_right_answer_to_show() -> None:
    settings = DataSettings(dataset="reasoning_gym:graph_color", dataset_config='{"size": 20}', prompt_style="few_shot")
    with pytest.raises(ConfigurationError, match="right answer"):
        load_dataset(settings)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="reasoning-gym"):
        load("reasoning_gym:chain_sum")


def test_arithmetic_takes_its_parameters_and_refuses_others() -> None:
    config = '{"digits": [1, 2], "operations": "+-", "template": "{a}{op}{b}="}'
    rows = dataset_rows.load(DataSettings(dataset="arithmetic", dataset_config=config))
    assert re.fullmatch(r"\d+[-+]\d+=", rows.train.take([0])[0].question)
    for name, value in (("digits", "[4]"), ("operations", '"/"'), ("template", '"What is {x}?"'), ("size", "3")):
        with pytest.raises(ConfigurationError, match=f"DATASET_CONFIG .*{name}"):
            dataset_rows.load(DataSettings(dataset="arithmetic", dataset_config=f'{{"{name}": {value}}}'))


@pytest.mark.slow
def test_questions_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        digests.add(load("reasoning_gym:isomorphic_strings", '{"size": 50}').train.digest())
    assert len(digests) == 1
