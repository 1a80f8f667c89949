"""The probe of PUBLISH_PROBE, by a worker that computes with the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from services.core.tasks import ServiceThread
from services.protocol.groups import Group
from tests.fake_service import fake_service, name_router
from tests.sequences import changed
from tests.trainer.rank_jobs import make_learner
from tests.trainer.test_lost_services import group
from tests.trainer.tiny import VOCABULARY, plain_model
from trainer.config.objective import Objective
from trainer.model.ranks import Ranks
from trainer.publishing.probe import Probe
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter


def with_completion(ids: list[int]) -> Group:
    """Return a group of one completion."""
    whole = group("g", 0)
    n = len(ids)
    first = changed(whole.sequences[0], completion_ids=ids, logprobs=[-2.0] * n, policy_versions=[0] * n)
    return whole.model_copy(update={"sequences": [first]})


@pytest.mark.parametrize("ids", [[5, VOCABULARY], []], ids=["unknown", "empty"])
def test_a_completion_that_cannot_be_probed_costs_no_worker(
    alone: Ranks, model: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int]
) -> None:
    plain = plain_model(model)

    def generate(request: dict[str, Any]) -> Any:
        tokens = torch.tensor(request["input_ids"]) % VOCABULARY  # an engine pads its embedding, and knows more ids
        with torch.no_grad():
            scores = plain(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        return {"meta_info": {"input_token_logprobs": [[s, 1, None] for s in (None, *scores.tolist())]}}

    learner = make_learner(alone, model, publish_probe=True)
    with fake_service({"POST /generate": generate}) as worker, fake_service({}) as router, ServiceThread() as thread:
        registered = {"id": "w", "url": worker.endpoint.url, "is_healthy": True}
        router.routes |= {"GET /workers": lambda _: {"workers": [registered]}, "DELETE /workers/w": lambda _: {}}
        name_router(router, monkeypatch)
        publisher = Publisher(learner.settings, thread, cast(VersionWriter, MagicMock()))
        probe = Probe(publisher, learner.policy, learner.logprobs)
        prepare = Objective(learner.settings).training_group
        metrics = probe.check([prepare(with_completion(ids)), prepare(with_completion([5, 6]))])
        assert metrics["probe_difference"] == pytest.approx(0, abs=1e-4)
        assert not router.asked("DELETE /workers/w")
        [asked] = worker.asked("POST /generate")
    assert asked["input_ids"] == [2, 3, 5, 6]
