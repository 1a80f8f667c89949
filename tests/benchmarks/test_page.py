"""docs/benchmarks.md is made of the benchmarks' output, and every benchmark has a command line."""

import argparse
import json

import pytest

from benchmarks import __main__ as page
from benchmarks.harness import Benchmark, Option, Side, in_turn, name_of, table

pytestmark = pytest.mark.leaving


def test_the_page_is_that_of_the_kept_measurements() -> None:
    assert page.page() == page.PAGE.read_text(), "run `python -m benchmarks --page-only`"


def test_everything_kept_is_a_benchmark() -> None:
    kept = set(page.KEPT.glob("*.json"))
    assert kept <= {path for section in page.SECTIONS for path in page.kept_files(section.name)}
    for path in kept:
        page.Measured(**json.loads(path.read_text()))


@pytest.mark.parametrize("section", page.SECTIONS, ids=lambda section: section.name)
def test_the_command_of_a_section_takes_its_options(section: page.Section) -> None:
    name = section.benchmark or section.name
    given = page.load(name).parser(name).parse_args([*section.options, "--quick", "--rounds", "2"])
    assert (given.quick, given.rounds) == (True, 2)


@pytest.mark.parametrize("name", page.BENCHMARKS)
def test_quick_values_are_those_of_options(name: str) -> None:
    benchmark = page.load(name)
    assert benchmark.quick.keys() <= benchmark.options.keys()
    for option, value in benchmark.quick.items():
        assert type(value) is type(benchmark.options[option].default), option


def test_a_benchmark_measures_its_sides_in_turn_and_writes_table_and_json(tmp_path, capsys) -> None:
    order: list[str] = []

    def measure(given: argparse.Namespace) -> list[Side]:
        def side(name: str) -> Side:
            return Side(name, lambda number: order.append(name) or {"s": [given.size * number, 1.0], "n": number})

        return in_turn([side("ours"), side("theirs")], given.rounds)

    benchmark = Benchmark(
        measure=measure,
        tables=lambda _, sides: [table("sizes", sides, {"": name_of, "s": lambda side: side.spread("s", 1)})],
        rounds=2,
        quick={"size": 5},
        options={"size": Option(3)},
        conclude=lambda _, sides: len(sides),
    )
    assert benchmark.run("one", ["--json", str(tmp_path / "found.json")]) == 2
    assert order == ["ours", "theirs", "ours", "theirs"]
    assert "1.0 (0.0 to 3.0)" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sides"]["theirs"] == [{"s": [0, 1.0], "n": 0}, {"s": [3, 1.0], "n": 1}]
    assert benchmark.run("one", ["--quick", "--json", str(tmp_path / "found.json")]) == 2
    assert json.loads((tmp_path / "found.json").read_text())["options"]["size"] == 5


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(SystemExit, match=r"no benchmark stepp; there are step, .*gpu"):
        page.main(["stepp"])
