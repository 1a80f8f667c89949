from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from structlog.testing import capture_logs

from services.core.errors import ConfigurationError
from services.protocol.rewards import BatchRewardRequest, RewardItem
from services.reward_server.app import create_app
from services.reward_server.own_code import check
from services.reward_server.settings import RewardSettings, parse_functions
from tests.waiting import IDLE_SECONDS, wait_until

JUDGED = {"judge_url": "http://127.0.0.1:1", "judge_model": "m", "judge_rubric": Path("rubric.yaml")}


def test_the_part_that_says_whether_an_answer_is_right_is_chosen_and_its_absence_told_at_the_start() -> None:
    for text, named, deciders in (
        ("math=0.5", None, ["math"]),
        ("format=1,my_rewards:f=-1,math=0", None, ["math"]),
        ("my_rewards:f,math,exact_match", None, ["math", "my_rewards:f", "exact_match"]),
        ("my_rewards:short=-1,format,my_rewards:f", None, ["my_rewards:f"]),
        ("format", None, ["format"]),
        ("reward_model", None, []),
        ("judge,format=0.2", None, []),
        ("judge_group,judge", None, []),
        ("judge,format=0.2", "judge", ["judge"]),
        ("math,my_rewards:f", "my_rewards:f", ["my_rewards:f"]),
    ):
        settings = RewardSettings(reward_fn=text, accuracy_fn=named, reward_model="m", **JUDGED)
        assert settings.deciders == deciders, text
        assert (settings.caution is None) == bool(deciders), text
    with capture_logs() as logs:
        create_app(RewardSettings(reward_fn="my_rewards:f=-1"))
    assert ["ACCURACY_FN" in log["event"] for log in logs] == [True]
    with pytest.raises(ConfigurationError, match=r"ACCURACY_FN is format.*math"):
        RewardSettings.load(accuracy_fn="format")


def test_rewards_that_do_not_exist_or_lack_a_setting_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("maths", "math=much", "math=nan", "math,math=2", "a b:c", "math;format", "math=", ""):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_functions(text)
        if text:
            with pytest.raises(ConfigurationError, match="REWARD_FN"):
                RewardSettings.load(reward_fn=text)
    for options in ({"reward_fn": "reward_model"}, {"reward_model": "x"}):
        with pytest.raises(ConfigurationError, match="REWARD_MODEL"):
            create_app(RewardSettings(**options))
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigurationError, match=r"\[reward\]"):
        create_app(RewardSettings.load())


async def test_one_answer_and_many(serving: Any) -> None:
    async with serving(create_app(RewardSettings(reward_workers=1, reward_timeout_seconds=600))) as client:
        right = {"prompt": "q", "response": "#### 5", "ground_truth": "5"}
        one = (await client.post("/reward", json=right)).json()
        assert one == {
            "reward": 1.0,
            "status": "scored",
            "components": {"math": 1.0},
            "decided_by": "math",
            "extracted": "5",
            "reason": None,
        }
        hostile = {**right, "response": r"\boxed{9^{9^{9}}}"}
        many = (await client.post("/batch_reward", json={"items": [right, hostile]})).json()["rewards"]
        assert [reward["reward"] for reward in many] == [1.0, None]
        assert many[1]["status"] == "over_limit", "of processor time"
        assert (await client.post("/batch_reward", json={"items": []})).json() == {"rewards": []}
        stats = (await client.get("/stats")).json()
        assert stats["answers"] == {"scored": 2, "over_limit": 1}
        metrics = (await client.get("/metrics")).text
        assert 'reward_answers_total{status="over_limit"}' in metrics


async def test_a_row_travels_once_a_request_and_alone_with_one_answer(serving: Any, plugin: str) -> None:
    async with serving(create_app(RewardSettings(reward_fn=f"{plugin}:check", reward_workers=1))) as client:
        one = {"prompt": "q", "response": "x", "ground_truth": "", "row": '{"tests": [1, 2]}'}
        assert (await client.post("/reward", json=one)).json()["reward"] == 3.0
        rows = {"a": '{"tests": [1, 2]}', "b": '{"tests": [], "difficulty": 5}'}
        items = [{**one, "row": key} for key in ("a", "b", "a")]
        many = (await client.post("/batch_reward", json={"items": items, "rows": rows})).json()["rewards"]
        assert [reward["reward"] for reward in many] == [3.0, 5.0, 3.0]
        refused = await client.post("/batch_reward", json={"items": items, "rows": {"a": "{}"}})
        assert refused.status_code == 422


def test_a_request_has_each_row_once() -> None:
    items = [RewardItem(prompt="q", response="x", ground_truth="", row=row) for row in ("{}", None, '{"a": 1}', "{}")]
    request = BatchRewardRequest.of(items)
    assert request.rows == {"0": "{}", "1": '{"a": 1}'}
    assert [item.row for item in request.items] == ["0", None, "1", "0"]
    assert BatchRewardRequest.model_validate_json(request.model_dump_json()).whole_items == items


def test_a_server_that_is_killed_leaves_no_process(start_service: Any, plugin: str, tmp_path: Path) -> None:
    service = start_service(
        "services.reward_server",
        REWARD_FN=f"{plugin}:moody",
        REWARD_CPU_SECONDS="600",
        REWARD_TIMEOUT_SECONDS="600",
        PYTHONPATH=str(tmp_path),
    )
    for asked in ("sleep", "burn"):
        item = {"prompt": "", "response": asked, "ground_truth": ""}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{service.url}/reward", json=item, timeout=httpx.Timeout(IDLE_SECONDS, read=0.5), trust_env=False
            )
    launcher = psutil.Process(service.process.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) >= 3, "workers")
    children = launcher.children(recursive=True)
    service.kill()
    _, alive = psutil.wait_procs(children, timeout=IDLE_SECONDS)
    assert alive == []


async def test_an_answer_that_does_not_fit_is_refused(serving: Any) -> None:
    bodies: list[Any] = [
        {"prompt": "q", "response": "x"},
        {"prompt": "q", "response": 5, "ground_truth": "5"},
        {"prompt": "q", "response": "x", "ground_truth": "5", "completion_tokens": -1},
        [],
        "text",
    ]
    async with serving(create_app(RewardSettings(reward_fn="exact_match"))) as client:
        for body in bodies:
            response = await client.post("/reward", json=body)
            assert response.status_code == 422, body
            assert response.json()["errors"]
        assert (await client.get("/stats")).json()["answers"] == {}


MIX = """
- {name: sums, dataset: arithmetic, reward_fn: exact_match}
- {name: files, dataset: rows.jsonl, reward_fn: "rewards_of_mine:by_column=0.5"}
- {name: words, dataset: arithmetic}
"""


@pytest.fixture
def mixed(tmp_path: Path, plugin: str) -> Any:
    """Make the settings of a run with these sources."""

    def make(text: str = MIX) -> RewardSettings:
        (tmp_path / "mix.yaml").write_text(text)
        return RewardSettings(sources=tmp_path / "mix.yaml", reward_workers=1, reward_fn="format=0.25")

    return make


async def test_an_answer_is_scored_by_the_rewards_of_its_source(serving: Any, mixed: Any) -> None:
    def item(source: str, row: str | None = None) -> RewardItem:
        return RewardItem(prompt="p", response="#### 7", ground_truth="#### 7", source=source, row=row)

    # A column named `source` is the dataset's, not the run's.
    row = '{"level": 4, "source": "a book"}'
    items = [item("words"), item("files", row), item("sums"), item("files", row)]
    async with serving(create_app(mixed())) as client:
        reply = await client.post("/batch_reward", json=BatchRewardRequest.of(items).model_dump(mode="json"))
        rewards = reply.json()["rewards"]
        assert [result["reward"] for result in rewards] == [0.25, 2.0, 1.0, 2.0], rewards
        assert [list(result["components"]) for result in rewards[:3]] == [
            ["format"],
            ["rewards_of_mine:by_column"],
            ["exact_match"],
        ]
        assert (await client.get("/stats")).json()["answers"] == {"scored": 4}


async def test_an_answer_of_an_unknown_source_is_refused(serving: Any, mixed: Any) -> None:
    async with serving(create_app(mixed())) as client:
        for source in ({}, {"source": "sum"}):
            answer = {"prompt": "p", "response": "7", "ground_truth": "7", **source}
            refusal = await client.post("/reward", json=answer)
            assert refusal.status_code == 422
            assert "files, sums, words" in refusal.json()["detail"]


async def test_a_reward_that_cannot_be_loaded_is_refused_with_its_source_before_the_first_answer(
    serving: Any, mixed: Any
) -> None:
    settings = mixed(MIX.replace("by_column=0.5", "by_colum"))
    with pytest.raises(ConfigurationError, match="rewards_of_mine:by_colum"):
        async with serving(create_app(settings)):
            pass
    with pytest.raises(ConfigurationError, match="source 'files': REWARD_FN 'rewards_of_mine:by_colum'"):
        check(settings)
    with pytest.raises(ConfigurationError, match="source 'words': REWARD_FN"):
        mixed(MIX.replace("words,", "words, reward_fn: maths,"))
