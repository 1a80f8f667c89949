"""Ray: a whole evaluation on a local Ray cluster, and the refusal where Ray is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evaluation import ray_nodes
from evaluation.allocation import Allocation
from evaluation.report import Results
from services.core.errors import DependencyLostError
from tests.evaluation.conftest import ARITHMETIC
from tests.waiting import IDLE_SECONDS


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_says_how_to_install_it(evaluate: Any, tiny_model: Path) -> None:
    command = evaluate("--model", tiny_model, "--scheduler", "ray", "--dataset", "arithmetic", PROMPT_STYLE="plain")
    assert command.wait() == 78
    assert "Ray is not installed here; install it with pip install ray" in command.text


class Reference(asyncio.Future[Any]):
    """Ray's reference to a result, which is not there while the actor waits for room."""


class FakeRay(ModuleType):
    """As much of Ray as the scheduler uses. A node's placement is its URL, None for one that waits, or an error."""

    def __init__(self, placements: list[str | Exception | None]) -> None:
        super().__init__("ray")
        self.placements, self.stopped, self.is_up = iter(placements), 0, False

    def init(self, **_: Any) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def wait(self, references: list[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
        return [one for one in references if one.done()], [one for one in references if not one.done()]

    def remote(self, **_: Any) -> Callable[[type], SimpleNamespace]:
        return lambda _: SimpleNamespace(remote=lambda _: self.actor(next(self.placements)))

    def actor(self, placement: str | Exception | None) -> SimpleNamespace:
        def method(result: Callable[[], Any]) -> SimpleNamespace:
            def call() -> Reference:
                reference = Reference()
                if isinstance(placement, Exception):
                    reference.set_exception(placement)
                elif placement is not None:
                    reference.set_result(result())
                return reference

            return SimpleNamespace(remote=call)

        def stop() -> None:
            self.stopped += 1

        return SimpleNamespace(url=method(lambda: placement), exit_code=method(lambda: 3), stop=method(stop))


async def test_nodes_are_found_as_ray_starts_them_and_all_that_started_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(["http://a:1", RuntimeError("the machine was lost"), None])
    monkeypatch.setitem(sys.modules, "ray", ray)
    async with asyncio.timeout(IDLE_SECONDS):
        async with ray_nodes.running(Allocation(data=3), {}) as (discover, _):
            assert await discover() == ["http://a:1"]
    assert (ray.stopped, ray.is_up) == (1, False)


async def test_a_lost_machine_ends_only_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(["http://a:1", RuntimeError("the machine was lost")])
    monkeypatch.setitem(sys.modules, "ray", ray)
    async with ray_nodes.running(Allocation(data=2), {}) as (_, watch):
        with pytest.raises(DependencyLostError, match="have ended, with 3, the machine was lost; see"):
            await watch()


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
