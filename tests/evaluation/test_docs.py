"""The commands of docs/evaluation.md run, with the tests' own model and servers."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.evaluation.conftest import ARITHMETIC, Here
from tests.pages import ROOT, blocks

BLOCKS = blocks(ROOT / "docs/evaluation.md")
HERE = [block.text.strip() for block in BLOCKS if block.language == "bash" and not block.words]
MODEL, RUN, URL = ".cache/models/smollm2-135m", "runs/my-run", "http://127.0.0.1:30000"


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE)
def test_its_commands_run(
    command: str,
    here: Here,
    engine: str,
    rewards: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command for a run starts engines of its own; the other ones ask an engine that runs already."""
    for version in ("v000001", "v000002"):
        shutil.copytree(tiny_model, tmp_path / "run/policy" / version)
    for block in BLOCKS:
        if block.language == "python" and block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    program, subcommand, *arguments = shlex.split(command)
    assert (program, subcommand) == ("grpo", "evaluate")
    given = {MODEL: str(tiny_model), RUN: str(tmp_path / "run"), URL: engine, f"{URL}/v1": f"{engine}/v1"}
    # A training run's settings are of its own model: the variables of the tests win over the file's.
    own = [option for name, value in ARITHMETIC.items() for option in ("--env", f"{name}={value}")]
    extra = ["--limit", "4", "--max-new-tokens", "4", "--reward-url", rewards, *own]
    extra += [] if RUN in command or URL in command else ["--url", engine]
    done = here(*(given.get(word, word) for word in arguments), *extra)
    results = done.results
    assert results["metrics"]["greedy pass@1"]["prompts"] == 4
    assert results["left_out"] == {}
    assert results["step"] == (2 if RUN in command else None)
    assert (results["agent"] != {}) == ("agent" in command)
