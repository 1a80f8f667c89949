"""Options, scheduling and fixtures of all tests."""

from __future__ import annotations

import collections
import gc
import logging
import os
import random
import re
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from services.core.endpoints import PROXY_VARIABLES
from tests.models import made_once
from tests.tolerance import TYPE_VARIABLES

pytest_plugins = ["tests.costs"]

ROOT = Path(__file__).parents[1]

# Models here are so small that a second thread only waits for the first. Before torch is imported; processes that tests
# start inherit it. A model that is not there is an error at once, not a time-out.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests ask services of this machine with clients of their own, which need no proxy of the developer's.
for variable in PROXY_VARIABLES:
    os.environ.pop(variable, None)
# As services/core/linear.py sets it, which another test may import only after its own first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Installed, the project hides its packages (pyproject.toml), and processes that tests start elsewhere import them.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# The tests must not depend on the processor's instructions.
for variable in TYPE_VARIABLES:
    os.environ.setdefault(variable, "float32")
# The environments of some Makefile targets lack hypothesis. Examples are the same in every run, and no machine is too
# slow for them.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --require-all, for Makefile targets that a person calls by name, and --order-seed, to try other orders."""
    parser.addoption("--require-all", action="store_true", help="fail each test that would be skipped, with the reason")
    parser.addoption("--order-seed", type=int, help="shuffle the files, and the tests of each, by this seed")


@pytest.fixture(autouse=True)
def kept_environment() -> Iterator[None]:
    """Undo what a test, or a program that it runs in this process, leaves in the environment."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def kept_logging() -> Iterator[None]:
    """Undo what a program that a test runs in this process leaves of its logging: a handler of a captured stream."""
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**configured)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test under --require-all, unless it is marked optional."""
    try:
        report = yield
    except SystemError:
        # CPython 3.11's parser, which shows a failure's source, may refuse beside a thread that parses, too.
        style, item.config.option.tbstyle = item.config.option.tbstyle, "native"
        report = pytest.TestReport.from_item_and_call(item, call)
        item.config.option.tbstyle = style
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and item.config.getoption("require_all") and item.get_closest_marker("optional") is None:
        assert isinstance(report.longrepr, tuple)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} cannot run here. {report.longrepr[2]}"
    return report


# Long files start first, so that no process waits at the end for a long test, and tests that compute run beside tests
# that wait.
FIRST = (
    "tests/cluster/",
    "tests/e2e/test_main_job.py",
    "tests/e2e/test_async_job.py",
    "tests/services/rollout_server/test_faults.py",
    "tests/trainer/model/test_learner.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first, or shuffle."""
    if (seed := config.getoption("order_seed")) is not None:
        order = random.Random(seed)
        place: dict[Path, float] = collections.defaultdict(order.random)
        items.sort(key=lambda item: (place[item.path], order.random()))
        return
    items.sort(key=lambda item: next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while the tests are imported, and later none among what they import: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# The tests of these files share fixtures that start slowly: job groups on several hosts, and a rollout server.
TOGETHER = (re.compile(r"tests/cluster/"), re.compile(r"tests/services/rollout_server/test_\w+_conformance\.py"))
# The tests of this file share nothing, and together they take long.
APART = "tests/test_guides.py"


class _ByFile(LoadFileScheduling):
    """A scheduler that runs the tests of a file, or of files that share a fixture, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        shared = next((pattern.pattern for pattern in TOGETHER if pattern.match(nodeid)), None)
        return shared or super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Return the scheduler of pytest-xdist."""
    return _ByFile(config, log)


@pytest.fixture
def waits_in_slow_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stopwatches run a thousand times as fast, so that on a busy machine, too, most of an episode was waiting."""
    real = time.monotonic
    monkeypatch.setattr("services.core.tasks.time", SimpleNamespace(monotonic=lambda: 1000 * real()))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A directory with the tiny model, which tests must not write to."""
    return made_once("tiny-model", [ROOT / "toys/arithmetic.py"], "toys.arithmetic")
