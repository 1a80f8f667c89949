"""docs/benchmarks.md is made of what the benchmarks printed."""

import importlib
import json

import pytest

from benchmarks import runner


def test_the_page_is_that_of_the_kept_measurements() -> None:
    assert runner.page() == runner.PAGE.read_text(), "run `python -m benchmarks --page-only`"


def test_everything_kept_is_a_benchmark() -> None:
    kept = set(runner.KEPT.glob("*.json"))
    assert kept <= {path for benchmark in runner.BENCHMARKS for path in runner.kept_files(benchmark.name)}
    for path in kept:
        runner.Measured(**json.loads(path.read_text()))


@pytest.mark.parametrize("benchmark", runner.BENCHMARKS, ids=lambda b: b.name)
def test_every_command_takes_its_options(benchmark: runner.Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.{benchmark.module}")
    with pytest.raises(SystemExit) as ended:
        module.main([*benchmark.options, "--quick", "--help"])
    assert ended.value.code == 0
    described = capsys.readouterr().out
    assert all(option in described for option in (*benchmark.options, "--quick") if option.startswith("--"))
