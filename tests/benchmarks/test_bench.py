"""docs/benchmarks.md is made of what the benchmarks printed."""

import importlib
import json

import pytest

from benchmarks import __main__


def test_the_page_is_that_of_the_kept_measurements() -> None:
    assert __main__.page() == __main__.PAGE.read_text(), "run `python -m benchmarks.__main__ --page-only`"


def test_everything_kept_is_a_benchmark() -> None:
    kept = {path.stem for path in __main__.KEPT.glob("*.json")}
    assert kept <= {benchmark.name for benchmark in __main__.BENCHMARKS}
    for path in __main__.KEPT.glob("*.json"):
        __main__.Measured(**json.loads(path.read_text()))


@pytest.mark.parametrize("benchmark", __main__.BENCHMARKS, ids=lambda b: b.name)
def test_every_command_takes_its_options(benchmark: __main__.Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(benchmark.module)
    with pytest.raises(SystemExit) as ended:
        module.main([*benchmark.options, *benchmark.quick, "--help"])
    assert ended.value.code == 0
    described = capsys.readouterr().out
    assert all(option in described for option in (*benchmark.options, *benchmark.quick) if option.startswith("--"))
