"""Tests of services/core/files.py."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError, DamagedFileError
from services.core.files import (
    atomic_write,
    check_model,
    check_model_directory,
    read_object,
    read_records,
    replace_directory,
    saved_steps,
)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, pieces())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("./model", "/no/model", "~/no-model", ".cache/models/other"):
        with pytest.raises(ConfigurationError, match=f"MODEL_NAME={model}: the directory does not exist"):
            check_model_directory(model)
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("weights.gguf").touch()
    for model in ("models", str(tmp_path / "models"), "./weights.gguf"):
        with pytest.raises(ConfigurationError, match=f"MODEL_NAME={model}: {tmp_path}/.* has no config.json"):
            check_model(model)
    Path("models/config.json").touch()
    for model in ("models", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2"):
        check_model(model)
        check_model_directory(model)


@pytest.mark.parametrize(("closed", "named"), [("model.safetensors", "model/model.safetensors"), (".", "model")])
def test_a_model_that_this_user_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch, closed: str, named: str) -> None:
    here = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    here.chmod(0o755)
    monkeypatch.chdir(here)
    for name in ("config.json", "model.safetensors"):
        (Path("model") / name).parent.mkdir(exist_ok=True)
        (Path("model") / name).touch()
    (Path("model") / closed).chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            ConfigurationError, match=rf"MODEL_NAME=model: {named} cannot be read \(Permission denied\)"
        ):
            check_model("model")
    finally:
        os.seteuid(user)
        Path("model").chmod(0o755)
        shutil.rmtree(here)


def test_the_projects_own_demo_model_is_named_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.core.files.PROJECT", tmp_path)
    demo_model = tmp_path / ".cache/models/smollm2-135m"
    demo_model.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=f"it is there as --env MODEL_NAME={demo_model}"):
        check_model_directory("elsewhere/models/smollm2-135m")


@pytest.mark.parametrize("target", ["nowhere", "elsewhere"])
def test_a_directory_takes_the_place_of_a_link_and_leaves_alone_where_it_leads(tmp_path: Path, target: str) -> None:
    new, old, elsewhere = tmp_path / "new", tmp_path / "old", tmp_path / "elsewhere"
    for directory in (new, elsewhere):
        directory.mkdir()
        (directory / directory.name).touch()
    for link in (old, tmp_path / ".old.replaced"):
        link.symlink_to(tmp_path / target)
    replace_directory(new, old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "old"]
    assert [path.name for path in old.iterdir()] == ["new"]
    assert [path.name for path in elsewhere.iterdir()] == ["elsewhere"]


def test_a_line_that_is_still_being_written_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"ste\n')
    with pytest.raises(DamagedFileError, match=r"metrics.jsonl, line 2 is damaged"):
        read_records(path)


@pytest.mark.parametrize("content", ['{"pid": 1', "[]", "null", "\xff"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nodes.json"
    assert read_object(path) == {}
    path.write_text(content, "latin-1")
    with pytest.raises(DamagedFileError, match=r"nodes.json is damaged"):
        read_object(path)


def test_steps_are_saved_under_whole_numbers(tmp_path: Path) -> None:
    for name in ("step-1000000", "step-999999", "step-000002", "step-99x", ".step-000003", "step-4"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [2, 999999, 1000000]
