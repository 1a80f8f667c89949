"""Ray: a whole evaluation on a local Ray cluster, and the refusal where Ray is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import Results
from tests.evaluation.conftest import ARITHMETIC


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_says_how_to_install_it(evaluate: Any, tiny_model: Path) -> None:
    command = evaluate("--model", tiny_model, "--scheduler", "ray", "--dataset", "arithmetic", PROMPT_STYLE="plain")
    assert command.wait() == 78
    assert "Ray is not installed here; install it with pip install ray" in command.text


@pytest.mark.oracles
def test_an_evaluation_runs_on_a_local_ray_cluster(evaluate: Any, tiny_model: Path) -> None:
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", tiny_model, "--scheduler", "ray", "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options)
    results = Results.model_validate(command.succeed())
    assert results.left_out == {}
    assert len(results.servers["urls"]) == 2
    assert len(command.samples()) == 500
