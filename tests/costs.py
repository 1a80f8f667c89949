"""Plugin of pytest: what each test costs, the limit for those of ``make test``, and what skips for lack of a program.

A test costs the processor seconds of its own process and of the child processes that it has waited for, without those
of fixtures that it shares with other tests. ``make test-times`` prints the costs of the last run.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

_CACHE = Path(__file__).parents[1] / ".cache"
FILE, SKIPPED = _CACHE / "test-times.tsv", _CACHE / "skipped-tests.txt"
MOST_SECONDS = 5.0
"""Of a processor, for a test of `make test` that starts no whole job group."""
FREE = ("slow", "e2e", "gpu", "sglang", "skypilot", "oracles", "openenv", "cuda", "museum", "models")
"""The marks of tests that may take more."""
PROGRAMS = {
    "bubblewrap": "bubblewrap",
    "Chromium": "chromium-headless-shell",
    "iproute2": "iproute2",
    "kubectl": "kubernetes-client",
    "rsync": "rsync",
    "C compiler": "gcc",
    "node": "nodejs",
    "curl": "curl",
    "harness": "make harnesses",
}
"""The Debian package of each program, by the word that the reason of a skip has for it. The last one is no package."""

_MARGIN = 2.0
"""The same test costs up to twice as much where two processes share a core's units and caches."""
_COUNT, _COUNT_SECONDS = 1_000_000, 0.045
"""A quiet processor counts so far in this time; tests may take more on one that is slower or busy."""
_MANY_MODULES = 200
"""A test that imports more, such as torch's, does it for those that come after it."""
_before = pytest.StashKey[tuple[float, float]]()
_modules = pytest.StashKey[int]()
_shared = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Return the processor seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Measure the fixtures that tests share; one that needs another counts it, too."""
    stash, start = request.session.stash, processor_seconds()
    before = stash.get(_shared, 0.0)
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            stash[_shared] = before + processor_seconds() - start


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Begin to count."""
    item.stash[_before] = processor_seconds(), item.session.stash.get(_shared, 0.0)
    item.stash[_modules] = len(sys.modules)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Fail a test that cost too much. The last one of a file is not charged for the end of what the file shares."""
    cost = _cost(item)
    yield
    if nextitem is not None and nextitem.parent is item.parent:
        cost = _cost(item)
    item.user_properties.append(("processor_seconds", round(cost, 2)))
    is_free = any(item.get_closest_marker(name) for name in FREE)
    imported = len(sys.modules) - item.stash[_modules]
    if cost > MOST_SECONDS and not is_free and imported < _MANY_MODULES:
        limit = MOST_SECONDS * max(_MARGIN, _slowness())
        if cost > limit:
            pytest.fail(
                f"took {cost:.1f} processor seconds; a test of `make test` may take {limit:.1f}. Show the same "
                "in process, share what it starts with other tests by a fixture, or mark it slow if a quick test "
                "shows it, too",
                pytrace=False,
            )


def _cost(item: pytest.Item) -> float:
    seconds, shared = item.stash[_before]
    return processor_seconds() - seconds - (item.session.stash.get(_shared, 0.0) - shared)


def _slowness() -> float:
    """Return how many times as long as on a quiet machine this processor takes now, at the worst of five times."""
    worst = 0.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(_COUNT):
            pass
        worst = max(worst, time.process_time() - start)
    return worst / _COUNT_SECONDS


class Costs:
    """The costs of a run's tests, gathered where their reports arrive."""

    def __init__(self, file: Path) -> None:
        """Begin with none; ``file`` gets them at the end."""
        self._file = file
        self._wall: dict[str, float] = collections.defaultdict(float)
        self._processor: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._wall[report.nodeid] += report.duration
        self._processor[report.nodeid] = dict(report.user_properties).get("processor_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        """Write the costs, the highest first."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self._wall, key=lambda test: -self._processor.get(test, 0.0))
        lines = [f"{self._wall[test]:.2f}\t{self._processor.get(test, 0.0):.2f}\t{test}\n" for test in ordered]
        self._file.write_text("# wall seconds, processor seconds, test\n" + "".join(lines))


def pytest_configure(config: pytest.Config) -> None:
    """Gather costs in the process that has all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(FILE))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped for lack of which program, and how to install it; keep the tests for `make test-skipped`."""
    skipped: dict[str, list[str]] = collections.defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        program = next((word for word in PROGRAMS if re.search(rf"\b{word}\b", reason)), "something else")
        skipped[program].append(report.nodeid)
    others = skipped.pop("something else", [])
    SKIPPED.write_text("".join(f"{test}\n" for tests in skipped.values() for test in tests))
    if skipped or others:
        terminalreporter.section("skipped")
        counts = [f"{len(tests)} for lack of {program}" for program, tests in skipped.items()]
        packages = " ".join(PROGRAMS[program] for program in PROGRAMS if program in skipped)
        rest = [f"{len(others)} for other reasons, which -rs shows"] if others else []
        terminalreporter.write_line(", ".join(counts + rest) + (f"; apt-get install {packages}" if packages else ""))


def main() -> None:
    """Print the costs of the last run, by file and of the 30 most expensive tests."""
    rows = [line.split("\t") for line in FILE.read_text().splitlines()[1:]]
    files: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
    for wall, processor, test in rows:
        of_file = files[test.split("::")[0]]
        of_file[:] = of_file[0] + float(wall), of_file[1] + float(processor), of_file[2] + 1
    print("   wall processor tests")
    for name, (wall, processor, count) in sorted(files.items(), key=lambda item: -item[1][1]):
        print(f"{wall:7.1f} {processor:9.1f} {count:5.0f} {name}")
    total = [sum(column) for column in zip(*files.values(), strict=True)]
    print(f"{total[0]:7.1f} {total[1]:9.1f} {total[2]:5.0f} in all; the most expensive tests:")
    for wall, processor, test in rows[:30]:
        print(f"{float(wall):7.1f} {float(processor):9.1f} {test}")


if __name__ == "__main__":
    main()
