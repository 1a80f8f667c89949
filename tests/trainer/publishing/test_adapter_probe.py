"""The probe after a publication of adapters, by workers whose answers are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from services.core.tasks import ServiceThread
from services.weights.policy_store import ADAPTER_NAME
from tests.fake_service import FakeService, fake_service, name_router
from trainer.config import TrainerSettings
from trainer.publishing.probe import AdapterProbe
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter

ALONE = [-2.0, -1.0, -3.0, -0.5]
NOISE = 0.01


class Worker:
    """A worker whose log-probabilities differ from the trainer's by NOISE this way or that, and its router."""

    def __init__(self, worker: FakeService, router: FakeService) -> None:
        self.change = 0.0
        """The change of the log-probabilities by its adapter; NaN if it has none."""
        self.is_registered = True
        self.url = worker.endpoint.url
        worker.routes["POST /generate"] = self.generate
        router.routes |= {"GET /workers": self.workers, "DELETE /workers/w": self.remove}

    def generate(self, request: dict[str, Any]) -> Any:
        change = self.change if request.get("lora_path") == ADAPTER_NAME else 0.0
        if change != change:
            return 400
        scores = [score + change + NOISE * (-1) ** place for place, score in enumerate(ALONE)]
        return {"meta_info": {"input_token_logprobs": [[score, 1, None] for score in (None, *scores)]}}

    def workers(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"workers": [{"id": "w", "url": self.url, "is_healthy": True}] if self.is_registered else []}

    def remove(self, _: dict[str, Any]) -> dict[str, Any]:
        self.is_registered = False
        return {}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    with fake_service({}) as service, fake_service({}) as router:
        name_router(router, monkeypatch)
        yield Worker(service, router)


class Prober:
    """A trainer's side: ``after(change)`` probes when the adapter adds ``change`` to its log-probabilities."""

    def __init__(self, thread: ServiceThread) -> None:
        self._thread = thread
        publisher = Publisher(TrainerSettings.load(), thread, cast(VersionWriter, MagicMock()))
        self._probe = AdapterProbe(publisher, [1, 2, 3, 4, 5], ALONE)

    def after(self, change: float) -> dict[str, float]:
        return self._thread.call(self._probe.check([score + change for score in ALONE]))


@pytest.fixture
def prober() -> Iterator[Prober]:
    with ServiceThread() as thread:
        yield Prober(thread)


def test_a_change_that_arrives_is_delivered_whole(worker: Worker, prober: Prober) -> None:
    for change in (0.1, 0.2, 0.15):
        worker.change = change
        found = prober.after(change)
        assert found["probe_delivered"] == pytest.approx(1)
        assert found["probe_difference"] == pytest.approx(NOISE)
    assert worker.is_registered


def test_a_worker_that_keeps_an_older_adapter_leaves_the_routing_though_it_differs_little(
    worker: Worker, prober: Prober
) -> None:
    worker.change = 0.1
    assert prober.after(0.1)["probe_delivered"] == pytest.approx(1)
    assert worker.is_registered
    found = prober.after(0.15)
    assert found["probe_delivered"] == pytest.approx(0)
    assert found["probe_difference"] < 0.1, "which a comparison of log-probabilities alone would let pass"
    assert not worker.is_registered


def test_a_change_within_the_noise_is_judged_once_it_has_grown(worker: Worker, prober: Prober) -> None:
    for change in (0.01, 0.02, 0.03):
        assert "probe_delivered" not in prober.after(change)
        assert worker.is_registered
    assert prober.after(0.05)["probe_delivered"] == pytest.approx(0)
    assert not worker.is_registered


def test_a_worker_without_an_adapter_leaves_the_routing(worker: Worker, prober: Prober) -> None:
    worker.change = float("nan")
    assert prober.after(0.0)["probe_difference"] == float("inf")
    assert not worker.is_registered
