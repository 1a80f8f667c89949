"""Groups are found by step, reward and text, the newest first, in a file that grows."""

import os

import pytest

from services.run_page import records
from services.run_page.records import GroupsQuery, SampleIndex, prompt_key
from tests.services.run_page.runs import append, episodes, group, write_run
from tests.waiting import IDLE_SECONDS


@pytest.fixture
def index(tmp_path, monkeypatch) -> SampleIndex:
    """Ten steps with two groups each: rewards 0, 1, 0, 0.5 and rewards 1, 1."""
    monkeypatch.setattr(records, "SEARCH_SECONDS", IDLE_SECONDS)
    return SampleIndex(write_run(tmp_path / "run", 10) / "samples.jsonl")


def steps(found):
    return [g["step"] for g in found.groups]


def test_the_newest_groups_come_first_and_whole(index):
    found = index.search(GroupsQuery(limit=3))
    assert steps(found) == [10, 10, 9]
    assert [len(g["completions"]) for g in found.groups] == [2, 4, 2]
    assert found.total == 20
    first = found.groups[1]
    assert first["prompt"] == "What is 20 plus 1?"
    assert first["completions"][1]["result"]["reason"] == "compared as numbers"
    assert "prompt" not in first["completions"][1]


def test_a_search_goes_on_where_it_was(index):
    seen, before = [], None
    while True:
        found = index.search(GroupsQuery(before=before, limit=7))
        seen += [g["group_id"] for g in found.groups]
        before = found.before
        if before is None:
            break
    assert len(seen) == len(set(seen)) == 20


def test_groups_are_found_by_steps_and_by_the_reward_of_any_completion(index):
    assert steps(index.search(GroupsQuery(step_from=3, step_to=4))) == [4, 4, 3, 3]
    for low, high, groups in [(1.0, None, 20), (0.4, 0.6, 10), (None, 0.0, 10), (0.6, 0.9, 0), (None, None, 20)]:
        assert len(index.search(GroupsQuery(limit=100, reward_from=low, reward_to=high)).groups) == groups
    # Those that teach nothing can be left out or sought.
    assert {len(g["completions"]) for g in index.search(GroupsQuery(limit=100, spread="mixed")).groups} == {4}
    assert {len(g["completions"]) for g in index.search(GroupsQuery(limit=100, spread="equal")).groups} == {2}


def test_a_prompt_is_found_at_every_step_at_which_it_was_sampled(index):
    again = group(11, 4, rewards=[1.0, 1.0])
    append(index.path, again)
    newest = index.search(GroupsQuery(limit=1)).groups[0]
    assert newest["groups_of_prompt"] == 2
    assert steps(index.search(GroupsQuery(prompt_key=newest["prompt_key"]))) == [11, 2]
    assert steps(index.search(GroupsQuery(limit=100, recurring=True))) == [11, 2]
    assert index.search(GroupsQuery(prompt_key=prompt_key("never asked"))).groups == []


def test_text_is_found_in_prompts_completions_conversations_and_the_verifiers_words(index):
    for text in ("what is 14 plus", "I SAY 14.", "compared as numbers", "run-0-14", "15"):
        assert "run-0-14" in [g["group_id"] for g in index.search(GroupsQuery(limit=100, text=text)).groups], text
    for field in ("finish_reason", "completion", "reward"):
        assert index.search(GroupsQuery(limit=100, text=field)).groups == []
    for step, text in enumerate(['say "no"', "line one\nline two", "schön 数", "back\\slash"], 11):
        append(index.path, group(step, 99, rewards=[1.0], completion=f"well, {text} then"))
        assert steps(index.search(GroupsQuery(text=text))) == [step]
    append(index.path, episodes(20, 98))
    for text in ("you found 372", "calculate", "12*31", "expression"):
        assert steps(index.search(GroupsQuery(text=text))) == [20], text


def test_what_could_not_be_scored_has_no_reward(index):
    append(index.path, group(11, 99, rewards=[None, None]))
    assert index.search(GroupsQuery(limit=1)).groups[0]["completions"][0]["reward"] is None
    assert 11 not in steps(index.search(GroupsQuery(limit=100, reward_from=-1e9)))


def test_a_group_whose_lines_come_in_two_parts_is_one(index):
    lines = group(11, 99, rewards=[0.0, 1.0, 0.0])
    append(index.path, lines[:1])
    assert len(index.search(GroupsQuery(limit=1)).groups[0]["completions"]) == 1
    append(index.path, lines[1:])
    found = index.search(GroupsQuery(limit=1))
    assert len(found.groups[0]["completions"]) == 3
    assert found.total == 21


def test_a_resumed_run_forgets_the_steps_it_dropped(index):
    index.refresh()
    partial = index.path.with_name(".samples.partial")
    append(partial, group(1, 2, rewards=[0.0, 1.0]) + group(2, 4, rewards=[0.0, 1.0]))
    os.rename(partial, index.path)
    assert steps(index.search(GroupsQuery(limit=100))) == [2, 1]


def test_no_samples_yet(tmp_path):
    found = SampleIndex(tmp_path / "samples.jsonl").search(GroupsQuery())
    assert (found.groups, found.before, found.total) == ([], None, 0)


def test_a_search_that_takes_long_says_how_far_it_has_come(index, monkeypatch):
    index.refresh()
    monkeypatch.setattr(records, "SEARCH_SECONDS", 0.0)
    found = index.search(GroupsQuery(text="not there"))
    assert found.groups == []
    assert found.before is not None


def test_tokens_are_sent_only_when_asked_for(index):
    append(index.path, episodes(11, 99))
    spans = [c["spans"] for c in index.search(GroupsQuery(limit=1)).groups[0]["completions"]]
    assert spans == [[], [], []]
    asked = index.search(GroupsQuery(before=21, limit=1, tokens=True)).groups[0]["completions"]
    assert asked[0]["spans"][0]["tokens"] == ["<call>", "12", "*31"]
    assert "spans" not in index.search(GroupsQuery(before=20, limit=1)).groups[0]["completions"][0]


def test_long_texts_are_cut_and_large_groups_come_one_after_another(index, monkeypatch):
    monkeypatch.setattr(records, "MAX_CHARACTERS", 100)
    lines = group(11, 4, rewards=[1.0])
    lines[0] |= {"completion": "x" * 101, "messages": [{"role": "user", "content": "y" * 1000}], "spans": ["z" * 200]}
    append(index.path, lines)
    [found] = index.search(GroupsQuery(limit=1, tokens=True)).groups
    [completion] = found["completions"]
    assert completion["completion"][:101] == "x" * 100 + "\n"
    assert completion["messages"][0]["content"][:101] == "y" * 100 + "\n"
    assert completion["spans"] == ["z" * 200]
    monkeypatch.setattr(records, "BLOCK_BYTES", 1)
    large = index.search(GroupsQuery(limit=10))
    assert (steps(large), large.before) == ([11], 20)
