"""``grpo groups``: from the record of a run to a file of groups, or to pairs that TRL trains on."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from scripts import groups
from services.core.errors import exit_code_of
from services.protocol import group_file
from tests.trainer.reporting.test_group_selection import answer, group, record
from toys.arithmetic import build_model, build_tokenizer


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose record has four groups of three answers each, of which the last is a conversation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    texts = ("1", "2", "3")
    tokenizer, run_dir = build_tokenizer(), tmp_path / "runs" / "r"
    chat = {
        "messages": [{"role": "user", "content": "1+1="}],
        "source": "chat",
        "prompt_ids": tokenizer("1+1=").input_ids,
    }
    # The messages of a prompt that is no conversation: more than they are is in the prompt.
    plain = {"messages": [{"role": "user", "content": "1+1="}], "prompt_ids": tokenizer("3*3=9 1+1=").input_ids}
    of_steps = [
        [
            group(step, number, *(answer([2 + n, 1], n / 2, completion=text) for n, text in enumerate(texts)), **fields)
            for number, fields in ((0, plain), (1, chat))
        ]
        for step in (1, 2)
    ]
    record(tmp_path, *of_steps)
    tokenizer.save_pretrained(run_dir / "model")
    (run_dir / "metrics.jsonl").write_text("")
    (run_dir / "config.json").write_text("{}")
    return run_dir


def call(*names: str, **options: Any) -> int:
    return exit_code_of(lambda: groups.main(*names, **options))


def test_a_selection_is_written_and_accounted_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("r", "reward > 0", out=Path("right.groups")) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines()] == [
        ["source", "answers", "right", "kept", "answers"],
        ["(all)", "6", "33.3%", "2"],
        ["chat", "6", "33.3%", "2"],
        ["left", "out:", "4", "equal", "to", "another"],
    ]
    head, found = group_file.read(Path("right.groups"))
    assert (head.run, head.where, head.tokenizer) == ("r", "reward > 0", "digest")
    kept = [(g.group_id, [s.completion for s in g.sequences]) for g in found]
    assert kept == [("2-0", ["2", "3"]), ("2-1", ["2", "3"])], "the newest of equal answers"
    assert call("r", "reward > 0", per_prompt=1) == 0
    assert ["chat", "6", "33.3%", "1"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sorted(path.name for path in Path().iterdir()) == ["right.groups", "runs"], (
        "without --out nothing is written"
    )


def test_held_out_prompts_of_the_run_and_of_other_files_are_left_out(run: Path, tmp_path: Path) -> None:
    (run / "evaluations.jsonl").write_text('{"step": 0, "prompt": "0 + 0 ="}\n')
    assert call(str(run), out=Path("file")) == 0
    assert {g.prompt.prompt for g in group_file.read(Path("file"))[1]} == {"1 + 1 ="}
    (tmp_path / "benchmark.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    Path("file").unlink()
    assert call(str(run), held_out=[Path("benchmark.jsonl")]) == 78


def test_what_cannot_be_selected_ends_with_78_and_names_the_cause(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("reward > 1", {}, "no answer"),
        ("reward > 1", {"pairs": True}, "no pair"),
        ("components['x'] == 1", {}, "components['x']"),
        ("reward >", {}, "reward >"),
        ("True", {"held_out": [Path("none.jsonl")]}, "none.jsonl"),
        ("True", {"held_out": [Path("runs/r/config.json")]}, "config.json, line 1"),
        ("True", {"out": Path("nowhere/file")}, "--out nowhere/file"),
    ]
    for where, options, named in refused:
        assert call("r", where, **options) == 78, where
        assert named in " ".join(capfd.readouterr().err.split())


def test_a_run_without_a_record_names_the_setting(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (run / "groups").iterdir():
        path.unlink()
    assert call("r") == 78
    assert "RECORD_GROUPS says" in " ".join(capfd.readouterr().err.split())


def test_pairs_need_the_tokenizer_of_the_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "model").rename(run / "elsewhere")
    (run / "model").mkdir()
    assert call("r", "True", out=Path("pairs.jsonl"), pairs=True) == 78
    assert "--pairs needs the tokenizer of" in capfd.readouterr().err
    assert not Path("pairs.jsonl").exists()


def test_pairs_are_lines_of_prompt_chosen_and_rejected(run: Path) -> None:
    assert call("r", "True", out=Path("pairs.jsonl"), pairs=True) == 0
    assert [orjson.loads(line) for line in Path("pairs.jsonl").read_bytes().splitlines()] == [
        {"prompt": "3*3=9 1+1=", "chosen": "3", "rejected": "1"},
        {
            "prompt": [{"role": "user", "content": "1+1="}],
            "chosen": [{"role": "assistant", "content": "3"}],
            "rejected": [{"role": "assistant", "content": "1"}],
        },
    ]


@pytest.mark.oracles
@pytest.mark.parametrize("source", ["", "chat"], ids=["texts", "conversations"])
def test_trls_dpo_trains_on_the_pairs(run: Path, source: str) -> None:
    """The policy comes to prefer what the better answer says."""
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    assert call("r", f"source == {source!r}", out=Path("pairs.jsonl"), pairs=True) == 0
    rows = datasets.load_dataset("json", data_files="pairs.jsonl", split="train", cache_dir="cache")
    for part in (build_model(), build_tokenizer()):
        part.save_pretrained("model")
    options = {"report_to": "none", "use_cpu": True, "learning_rate": 1e-3, "bf16": False}
    arguments = trl.DPOConfig(
        output_dir="trained", max_steps=5, per_device_train_batch_size=1, logging_steps=1, save_strategy="no", **options
    )
    trainer = trl.DPOTrainer("model", args=arguments, train_dataset=rows)
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 0.01
