"""The engines of the router's workers, which their labels name."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import DependencyLostError
from services.engines.engine import ENGINES, Embedded, Engine, WorkerRefusedError, choose_engine
from services.engines.router import ENGINE_LABEL, RouterAdmin, Worker
from services.engines.settings import EngineKind, RolloutSettings
from tests.fake_service import fake_service


def listed(**metadata: Any) -> Worker:
    return Worker(id="w", url="http://127.0.0.1:1", is_healthy=True, metadata=metadata)


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_worker_that_a_launcher_registers_comes_back_as_its_engine(kind: EngineKind) -> None:
    workers: list[dict[str, Any]] = []

    def add(request: dict[str, Any]) -> dict[str, Any]:
        # As the router does it, with what it found out by itself.
        metadata = {"model_path": "a-model", **request["labels"]}
        workers.append({"id": "w", "url": request["url"], "is_healthy": True, "metadata": metadata})
        return {}

    with fake_service({"GET /workers": lambda _: {"workers": workers}, "POST /workers": add}) as service:
        async with RouterAdmin(service.endpoint) as router:
            await router.add(ENGINES[kind]("http://127.0.0.1:1", timeout=1))
            [worker] = await router.workers()
    assert type(worker.engine("a-token", timeout=2)) is ENGINES[kind]


def test_a_worker_without_a_label_is_an_sglang() -> None:
    engine = listed(model_path="a-model").engine(None, timeout=2)
    assert (type(engine), engine.url, engine.timeout) == (Engine, "http://127.0.0.1:1", 2)


def test_an_unknown_engine_is_refused_with_its_name() -> None:
    with pytest.raises(DependencyLostError, match=r"an engine 'vllm', which is none of sglang, embedded"):
        listed(**{ENGINE_LABEL: "vllm"}).engine(None, timeout=2)


def test_every_kind_has_an_engine() -> None:
    assert set(ENGINES) == set(EngineKind) - {EngineKind.AUTO}
    assert all(engine.kind is kind for kind, engine in ENGINES.items())


@pytest.mark.parametrize("gpus", [0, 8])
def test_auto_is_sglang_where_there_is_a_gpu(gpus: int) -> None:
    for kind, engine in ENGINES.items():
        assert choose_engine(RolloutSettings(rollout_engine=kind), gpus) is engine
    assert choose_engine(RolloutSettings(rollout_engine="auto"), gpus) is (Engine if gpus else Embedded)


@pytest.mark.parametrize("entries", [None, [], [[None, 5, None]], [[None, 5, None], [-0.5, 6, None]]])
@pytest.mark.parametrize("kind", ENGINES)
async def test_an_engine_that_ends_before_it_has_scored_a_text_has_refused(kind: str, entries: list[object]) -> None:
    reply = {"text": "", "meta_info": {} if entries is None else {"input_token_logprobs": entries}}
    engine_class = ENGINES[kind]
    with fake_service({f"POST {engine_class.generate_path}": lambda _: reply}) as service:
        async with engine_class(service.endpoint.url, timeout=30) as engine:
            with pytest.raises(WorkerRefusedError, match="of 2 input logprobs"):
                await engine.rescore([5, 6, 7])
