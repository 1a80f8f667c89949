"""A trainer's publisher and an engine in this process: the engine computes what the trainer has published."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.core.endpoints import ENDPOINTS_VARIABLE, ROUTER_PORT, WEIGHTS_BROADCAST_PORT
from services.core.tasks import ServiceThread
from services.embedded_engine.app import create_app
from services.engines.engine import ASLEEP, Embedded
from services.engines.router import ENGINE_LABEL
from services.weights.policy_store import ADAPTER_NAME
from tests.adapters import RANK
from tests.fake_service import fake_service
from tests.services.embedded_engine.conftest import PROMPT, settings_for
from tests.services.run_page.serving import served_ready
from tests.tolerance import engine_tolerance
from tests.waiting import IDLE_SECONDS
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.publishing.publisher import Publisher, ask_workers
from trainer.publishing.writer import VersionWriter


@pytest.mark.parametrize(
    ("transport", "lora_rank", "engine_sleeps"),
    [("local", 0, False), ("disk", 0, True), ("disk", RANK, False), ("broadcast", RANK, True)],
    ids=["shared memory", "disk after a sleep", "adapter by disk", "adapter in the request after a sleep"],
)
def test_an_engine_computes_what_was_published(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    lora_rank: int,
    engine_sleeps: bool,
) -> None:
    settings = TrainerSettings.load(
        model_name=str(tiny_model),
        shared_dir=tmp_path,
        run_id="r",
        publish_transport=transport,
        publish_type="float32",
        lora_rank=lora_rank,
        engine_sleeps=engine_sleeps,
    )

    async def ask(url: str) -> tuple[str, list[float]]:
        async with Embedded(url, timeout=IDLE_SECONDS) as engine:
            return await engine._version_text(), await engine.rescore(PROMPT, ADAPTER_NAME if lora_rank else None)

    async def version(url: str) -> str:
        async with Embedded(url, timeout=IDLE_SECONDS) as engine:
            return await engine._version_text()

    with (
        served_ready(create_app(settings_for(tiny_model))) as url,
        fake_service({}) as router,
        join_ranks() as ranks,
        ServiceThread() as thread,
    ):
        worker = {"id": "w", "url": url, "is_healthy": True, "metadata": {ENGINE_LABEL: "embedded"}}
        router.routes["GET /workers"] = lambda _: {"workers": [worker]}
        addresses = {
            f"rollout-server-0:{ROUTER_PORT}": f"{router.endpoint.host}:{router.endpoint.port}",
            f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": "127.0.0.1:1",
        }
        monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
        policy = load_policy(settings, ranks)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, policy.parameters()):
                whole = parameter.to_local()  # there is one rank
                whole.add_(0.03 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)))
        publisher = Publisher(settings, thread, VersionWriter(settings, policy, ranks))
        if engine_sleeps:
            thread.call(ask_workers(settings, "sleep", lambda engine: engine.sleep()))
            assert asyncio.run(version(url)) == f"0{ASLEEP}"
        assert publisher.publish(3)["workers"] == 1
        served, logprobs = asyncio.run(ask(url))
        publisher.writer.close()
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model.load_state_dict(dict(policy.full_parameters(Rounding(torch.float32))), strict=False)
    with torch.inference_mode():
        scores = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    wanted = [float(scores[place, token]) for place, token in enumerate(PROMPT[1:])]
    assert (served, logprobs) == ("3", pytest.approx(wanted, abs=engine_tolerance()))
