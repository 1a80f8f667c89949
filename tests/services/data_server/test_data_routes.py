from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.data_server.app import create_app
from services.data_server.settings import DataSettings
from tests.rows import write_rows
from tests.waiting import wait_ready


@pytest.fixture
def app(tmp_path: Path) -> Any:
    def make(rows: int = 40, *, on_disk: bool = False, **options: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        if rows:
            lines = [{"question": "x" * (i % 20) + f" {i}?", "answer": f"#### {i}"} for i in range(rows)]
            write_rows(path, lines)
            options = {"dataset": str(path), "instruction": "none", **options}
        return create_app(DataSettings(shared_dir=tmp_path, run_id="r", **options), own_process=on_disk)

    return make


def database(tmp_path: Path) -> Path:
    [found] = tmp_path.glob("runs/r/data/*/data-server.sqlite")
    return found


async def drawn(client: Any, **params: Any) -> list[tuple[int, int]]:
    response = await client.get("/prompts", params=params)
    assert response.status_code == 200, response.text
    return [(prompt["epoch"], prompt["position"]) for prompt in response.json()["prompts"]]


async def test_consumers_have_cursors_of_their_own_and_those_that_share_one_get_different_prompts(
    serving: Any, app: Any
) -> None:
    async with serving(app()) as client:
        assert await drawn(client, consumer="a") == [(0, 0), (0, 1), (0, 2), (0, 3)]
        assert await drawn(client, consumer="b", batch_size=2) == [(0, 0), (0, 1)]
        shared = await asyncio.gather(*(drawn(client, consumer="a", batch_size=3) for _ in range(4)))
        assert sorted(p for batch in shared for p in batch) == [(0, p) for p in range(4, 16)]
        stats = (await client.get("/stats")).json()
        assert stats["cursors"]["a/train"] == {"epoch": 0, "position": 16}


async def test_an_explicit_position_depends_on_nothing_else(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        first = (await client.get("/prompts", params={"epoch": 3, "position": 5})).json()
        await drawn(client)
        assert (await client.get("/prompts", params={"epoch": 3, "position": 5})).json() == first
        posted = await client.post("/prompts", json={"cursor": {"epoch": 3, "position": 5}})
        assert posted.json() == first
    async with serving(app()) as again:
        assert (await again.get("/prompts", params={"epoch": 3, "position": 5})).json() == first


async def test_a_repeated_request_gets_the_same_prompts_and_uses_none_up(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        first = await drawn(client, request_id="r1")
        assert await drawn(client, request_id="r1") == first
        assert await drawn(client, request_id="r2") == [(0, p) for p in range(4, 8)]


async def test_cursors_can_be_read_and_set_with_prompts_to_skip(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        await drawn(client, consumer="a")
        assert (await client.get("/cursor", params={"consumer": "a"})).json()["position"] == 4
        cursor = {"epoch": 1, "position": 2, "skip": [3, 4, 30]}
        assert (await client.put("/cursor", json={"consumer": "a", "cursor": cursor})).status_code == 200
        assert await drawn(client, consumer="a", batch_size=2) == [(1, 2), (1, 5)]
        assert (await client.get("/cursor", params={"consumer": "a"})).json() == {
            "epoch": 1,
            "position": 6,
            "skip": [30],
        }


async def test_cursors_survive_a_restart_in_the_run_directory(serving: Any, app: Any) -> None:
    async with serving(app(on_disk=True)) as client:
        await drawn(client, consumer="a", request_id="r1")
    async with serving(app(on_disk=True, data_seed=1)) as client:
        assert await drawn(client, consumer="a") == [(0, p) for p in range(4)], "another order has its own cursors"
    async with serving(app(on_disk=True)) as client:
        assert await drawn(client, consumer="a", request_id="r1") == [(0, p) for p in range(4)]
        assert await drawn(client, consumer="a") == [(0, p) for p in range(4, 8)]


async def test_a_state_that_cannot_be_written_stops_the_start(app: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a directory")
    application = app(on_disk=True)
    async with application.router.lifespan_context(application):
        with pytest.raises(ConfigurationError, match="SHARED_DIR"):
            await wait_ready(application)


async def test_prompts_of_too_many_tokens_are_passed_over_and_counted(serving: Any, app: Any, chat_model: str) -> None:
    # One token a byte: the template takes 3, " i?" takes 3 or 4, the rest is x.
    async with serving(app(model_name=chat_model, max_prompt_tokens=15)) as client:
        seen = []
        for _ in range(40):
            batch = (await client.get("/prompts", params={"batch_size": 1})).json()["prompts"]
            seen += [p for p in batch if p["epoch"] == 0]
        assert all(len(p["prompt_ids"]) <= 15 for p in seen)
        stats = (await client.get("/stats")).json()
        assert stats["refused"]["too long"] > 0
        assert len({p["id"] for p in seen}) == len(seen)
        train_long = 38 - len(seen)
        assert (stats["train_prompts"], stats["rows"]) == (38, 40)
        assert 0 < train_long <= stats["refused"]["too long"]


async def test_when_every_prompt_is_too_long_the_service_does_not_start(app: Any, chat_model: str) -> None:
    application = app(model_name=chat_model, max_prompt_tokens=2)
    async with application.router.lifespan_context(application):
        with pytest.raises(ConfigurationError, match="MAX_PROMPT_TOKENS=2"):
            await wait_ready(application)


async def test_the_held_out_prompts_come_in_order_and_end(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        reply = (await client.get("/prompts", params={"split": "test", "batch_size": 50, "epoch": 0})).json()
        assert len(reply["prompts"]) == 2
        assert reply["cursor"] == {"epoch": 1, "position": 0, "skip": []}


async def test_a_full_disk_is_told_by_every_route_that_writes_and_loses_nothing(
    serving: Any, app: Any, tmp_path: Path
) -> None:
    async with serving(app(on_disk=True, curriculum="balanced")) as client:
        first = (await client.get("/prompts", params={"consumer": "a"})).json()["prompts"][0]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(f"{database(tmp_path)}-wal").st_size, limits[1]))
        try:
            refused = [
                await client.get("/prompts", params={"consumer": "a"}),
                await client.get("/prompts", params={"epoch": 7}),
                await client.put("/cursor", json={"consumer": "a", "cursor": {"epoch": 1}}),
                await client.post("/success_rates", json={"success_rates": {first["id"]: 0.5}}),
            ]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [reply.status_code for reply in refused] == [507] * 4, [reply.text for reply in refused]
        assert await drawn(client, consumer="a") == [(0, p) for p in range(4, 8)]


async def test_success_rates_order_the_next_epoch_and_survive_a_restart(serving: Any, app: Any, tmp_path: Path) -> None:
    options = {"rows": 400, "curriculum": "balanced", "on_disk": True}
    async with serving(app(**options)) as client:
        prompts = (await client.get("/prompts", params={"batch_size": 380})).json()["prompts"]
        assert {p["epoch"] for p in prompts} == {0}
        rates = {p["id"]: int(p["ground_truth"]) % 2 / 2 for p in prompts}
        assert (await client.get("/stats")).json()["curriculum"] == "balanced", "so trainers know to send rates"
        reply = (await client.post("/success_rates", json={"success_rates": {**rates, "elsewhere/9": 1.0}})).json()
        assert reply == {"recorded": 380, "unknown": 1}
        second = (await client.get("/prompts", params={"batch_size": 380})).json()["prompts"]
        assert {p["epoch"] for p in second} == {1}
        assert sorted(p["id"] for p in second) == sorted(p["id"] for p in prompts)
        assert sum(int(p["ground_truth"]) % 2 for p in second[:150]) > 120
        # What is recorded in the course of an epoch changes that epoch no more.
        await client.post("/success_rates", json={"success_rates": dict.fromkeys(rates, 0.5)})
    async with serving(app(**options)) as client:
        again = (await client.get("/prompts", params={"batch_size": 380, "epoch": 1})).json()["prompts"]
        assert again == second


async def test_a_query_that_does_not_fit_is_refused_and_moves_no_cursor(serving: Any, app: Any) -> None:
    async with serving(app()) as client:
        for params in (
            {"batch_size": 0},
            {"batch_size": "x"},
            {"batch_size": 5000},
            {"split": "validation"},
            {"position": 39},
            {"epoch": -1},
            {"epoch": 2**31},
            {"epoch": 2**31 - 2, "batch_size": 4096},
            {"epoch": 2**31 - 1, "position": 38},
            {"epoch": 2**31 - 1, "batch_size": 4096, "split": "test"},
            {"consumer": ""},
            {"batchsize": 4},
        ):
            response = await client.get("/prompts", params=params)
            assert response.status_code == 422, params
            assert (await client.get("/cursor")).json()["position"] == 0


@pytest.fixture
def mixed(tmp_path: Path) -> Any:
    """Make a data-server of two sources to train on, and one to evaluate only."""
    write_rows(tmp_path / "words.jsonl", [{"question": f"word {i}?", "answer": f"{i}"} for i in range(20)])
    write_rows(tmp_path / "exam.jsonl", [{"question": f"exam {i}?", "answer": f"{i}"} for i in range(7)])
    default = f"""
- {{name: words, ratio: 2, dataset: {tmp_path}/words.jsonl, group_size: 4, instruction: none, reward_fn: format}}
- {{name: sums, dataset: arithmetic, curriculum: balanced}}
- {{name: exam, eval_only: true, dataset: {tmp_path}/exam.jsonl}}
"""

    def make(text: str = default, *, on_disk: bool = False) -> Any:
        (tmp_path / "mix.yaml").write_text(text)
        settings = DataSettings(shared_dir=tmp_path, run_id="r", sources=tmp_path / "mix.yaml")
        return create_app(settings, own_process=on_disk)

    make.default = default  # type: ignore[attr-defined]
    return make


async def test_each_source_has_its_own_prompts_cursors_and_epochs(serving: Any, mixed: Any) -> None:
    async with serving(mixed()) as server:
        words = (await server.get("/prompts", params={"source": "words", "consumer": "a", "batch_size": 25})).json()
        assert words["total_available"] == 19
        assert [prompt["epoch"] for prompt in words["prompts"]] == [0] * 19 + [1] * 6
        assert {(p["source"], p["id"].rsplit("/", 1)[0]) for p in words["prompts"]} == {("words", "words/train")}
        sums = (await server.post("/prompts", json={"source": "sums", "batch_size": 2})).json()
        assert [prompt["id"].split("/")[0] for prompt in sums["prompts"]] == ["sums", "sums"]
        cursors = [
            (await server.get("/cursor", params={"source": source, "consumer": "a"})).json()["epoch"]
            for source in ("words", "sums")
        ]
        assert cursors == [1, 0]


async def test_an_unknown_source_is_refused_with_those_there_are(serving: Any, mixed: Any, app: Any) -> None:
    async with serving(mixed()) as server:
        for source in ("", "word"):
            refusal = await server.get("/prompts", params={"source": source})
            assert refusal.status_code == 422
            assert "exam, sums, words" in refusal.json()["detail"]
    async with serving(app()) as server:
        assert (await server.get("/prompts", params={"source": "words"})).status_code == 422


async def test_a_source_for_evaluation_only_holds_every_row_out(serving: Any, mixed: Any) -> None:
    async with serving(mixed()) as server:
        exam = await server.get("/prompts", params={"source": "exam", "split": "test", "batch_size": 9})
        assert len(exam.json()["prompts"]) == 7
        assert (await server.get("/prompts", params={"source": "exam"})).status_code == 422
        stats = (await server.get("/stats")).json()
        assert (stats["sources"]["exam"]["train_prompts"], stats["sources"]["exam"]["test_prompts"]) == (0, 7)
        assert stats["train_prompts"] == stats["sources"]["sums"]["train_prompts"] + 19


async def test_the_fingerprint_names_every_source_its_ratio_and_its_settings(serving: Any, mixed: Any) -> None:
    async def fingerprint(text: str) -> dict[str, str]:
        async with serving(mixed(text)) as server:
            lines: dict[str, str] = (await server.get("/stats")).json()["fingerprint"]
            return lines

    before = await fingerprint(mixed.default)
    assert before["words: settings"] == "ratio 2, GROUP_SIZE 4, REWARD_FN format"
    assert before["exam: settings"] == "eval_only"
    for old, new, changed in (
        ("ratio: 2", "ratio: 3", {"words: settings"}),
        ("group_size: 4", "group_size: 5", {"words: settings"}),
        ("reward_fn: format", "reward_fn: exact_match", {"words: settings"}),
        ("words.jsonl", "exam.jsonl", {"words: training prompts", "words: held-out prompts"}),
        ("curriculum: balanced", "curriculum: off", {"sums: order"}),
    ):
        now = await fingerprint(mixed.default.replace(old, new))
        assert {part for part in before | now if before.get(part) != now.get(part)} == changed


async def test_success_rates_find_their_source_and_all_state_survives_a_restart(serving: Any, mixed: Any) -> None:
    rates = {"words/train/3": 0.5, "sums/train/5": 1.0, "gsm8k/train/5": 1.0}
    async with serving(mixed(on_disk=True)) as server:
        reply = await server.post("/success_rates", json={"success_rates": rates})
        assert reply.json() == {"recorded": 2, "unknown": 1}
        await server.get("/prompts", params={"source": "sums", "consumer": "a"})
    async with serving(mixed(on_disk=True)) as server:
        stats = (await server.get("/stats")).json()["sources"]
        assert [stats[name]["cursors"] for name in ("sums", "words")] == [
            {"a/train": {"epoch": 0, "position": 4}},
            {},
        ]


async def test_a_bad_dataset_names_its_source(serving: Any, mixed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="source 'a': DATASET"):
        async with serving(mixed(f"- {{name: a, dataset: {tmp_path}/gone.jsonl}}")):
            pass
