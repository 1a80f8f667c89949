"""A run's files arrive whole and checked, or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core.errors import exit_code_of
from tests.pages import grpo_command
from tests.skypilot_facts import skypilot_facts

ROOT = Path(__file__).parents[2]
FILES = {"config.json": b"{}", "weights/model.safetensors": bytes(range(256)) * 400}
# The pod: SkyPilot's commands are noted, and its host is this machine, with the volume elsewhere.
SKY = """#!/bin/bash
echo "$1 ${*: -1}" >> "$CALLS"
[[ " $FAILING " != *" $1 "* ]]
"""
# As old as that of macOS.
RSYNC = """#!/bin/bash
[[ "$*" == *--info=* ]] && echo "rsync: --info: unknown option" && exit 1
exec {rsync} "$@"
"""
SSH = """#!/bin/bash
shift
command="$*"
exec bash -c "${command//\\/shared\\/runs/$VOLUME}"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A directory to work in, beside the volume of a cluster with a run."""
    for name, content in FILES.items():
        path = tmp_path / "volume/grpo-1/model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, content in {"sky": SKY, "ssh": SSH, "rsync": RSYNC.format(rsync=shutil.which("rsync"))}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(content)
        program.chmod(0o755)
    (tmp_path / "work").mkdir()
    return tmp_path


Fetch = Callable[..., tuple[int, str]]


@pytest.fixture
def fetch(cluster: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Fetch:
    """Runs the command in this process; returns its exit code and what it says."""
    monkeypatch.chdir(cluster / "work")
    monkeypatch.setenv("PATH", str(cluster / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("VOLUME", str(cluster / "volume"))
    monkeypatch.setenv("CALLS", str(cluster / "calls"))

    def run(*arguments: str, failing: str = "") -> tuple[int, str]:
        monkeypatch.setenv("FAILING", failing)
        code = exit_code_of(lambda: grpo_command("fetch").main([*arguments], standalone_mode=False))
        said = capfd.readouterr()
        return code or 0, said.out + said.err

    return run


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def calls(tmp_path: Path) -> list[str]:
    """SkyPilot's commands in short: the pod is launched and always taken down again."""
    lines = (tmp_path / "calls").read_text().splitlines()
    (name,) = {line.split()[1] for line in lines if line.startswith("down")}
    return [line.replace(name, "POD").replace(str(ROOT), "") for line in lines]


needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@needs_rsync
def test_a_model_is_fetched_by_a_pod_also_after_an_interruption(cluster, fetch):
    partial = cluster / "work/runs/grpo-1/.model.partial"
    partial.mkdir(parents=True)
    (partial / "config.json").write_bytes(b"[]")
    shutil.copystat(cluster / "volume/grpo-1/model/config.json", partial / "config.json")
    (partial / "of-another-time").touch()
    code, said = fetch("grpo-1")
    assert code == 0, said
    assert files(cluster / "work/runs/grpo-1") == {f"model/{name}": content for name, content in FILES.items()}
    assert "2 files" in said
    assert calls(cluster) == ["launch /scripts/fetch.yaml", "down POD"]
    code, said = fetch("grpo-1")
    assert (code, "is there already" in said) == (78, True), said


@needs_rsync
def test_a_pod_that_does_not_end_costs_neither_the_model_nor_the_reason_of_a_failure(cluster, fetch):
    code, said = fetch("grpo-1", failing="down")
    assert (code, "the pod may still be there; end it by: sky down fetch-" in said) == (0, True), said
    assert files(cluster / "work/runs/grpo-1/model") == FILES
    shutil.rmtree(cluster / "work/runs")
    code, said = fetch("grpo-1", failing="launch down")
    assert code == 33, said
    assert f"{shlex.quote(str(ROOT / 'scripts/fetch.yaml'))} ended with 1; repeat the command" in said


@needs_rsync
def test_a_run_that_the_volume_does_not_have_is_named_with_those_it_has(cluster, fetch):
    code, said = fetch("grpo-2")
    assert code == 78, said
    assert "/shared/runs/grpo-2/model cannot be read on the volume" in said
    assert "newest first: grpo-1" in said
    assert calls(cluster)[-1] == "down POD"


@needs_rsync
def test_what_was_fetched_before_is_not_taken_for_the_run(cluster, fetch):
    assert fetch("grpo-1")[0] == 0
    (cluster / "volume/grpo-1/metrics.jsonl").write_text('{"step": 1}\n')
    code, said = fetch("grpo-1", "--what", ".", "--to", "whole")
    assert code == 0, said
    assert (cluster / "work/whole/metrics.jsonl").exists()
    assert files(cluster / "work/whole/model") == FILES


def test_without_its_programs_it_names_them_and_leaves_nothing(cluster, fetch, monkeypatch):
    for name in ("sky", "rsync"):
        (cluster / "bin" / name).unlink()
    monkeypatch.setenv("PATH", str(cluster / "bin"))
    code, said = fetch("grpo-1")
    assert code == 78, said
    assert "sky, rsync not found on PATH; fetching from a cluster needs sky, ssh, rsync" in said
    assert not list((cluster / "work").iterdir())


def test_skypilot_reads_the_pod_as_a_small_one_with_the_volume():
    (pod,) = skypilot_facts()["files"]["scripts/fetch.yaml"]["tasks"].values()
    assert (pod["volumes"], pod["accelerators"], pod["num_nodes"]) == ({"/shared": "grpo-shared"}, [], 1)
