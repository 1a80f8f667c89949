"""Requests made up by schemathesis from the services' own OpenAPI pages: no 500, no hang, no undocumented answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.waiting import IDLE_SECONDS

BOUNDED = settings(
    max_examples=3,
    phases=[Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
)


TAKE_ANYTHING = (
    "/health",
    "/metrics",
    "/settings",
    "/stats",
    "/models",
    "/{session_id}",
    "/{response_id}",
    "/finish",
    "/trace",
    "/groups",
    "/queue",
)
"""Ends of paths that take nothing, only a session's id, which any text may be, or bytes that no schema describes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "environment"),
    [
        ("services.data_server", {"DATASET": "arithmetic"}),
        ("services.reward_server", {"REWARD_WORKERS": "1"}),
        ("services.replay_buffer", {}),
        ("services.gateway", {"MODEL_NAME": "the tiny model"}),
    ],
)
def test_made_up_requests_get_documented_answers(
    start_service: Any, tiny_model: Path, module: str, environment: dict[str, str]
) -> None:
    # Not above: it takes seconds, which every process that collects tests would spend.
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    # Our rules say more than a schema can (one logprob a token), and pydantic takes a true for a 1.
    not_promised = [positive_data_acceptance, negative_data_rejection]
    if "MODEL_NAME" in environment:
        environment = {"MODEL_NAME": str(tiny_model)}
    service = start_service(module, LOG_LEVEL="warning", **environment)
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 5
    for operation in operations:
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and operation.path.endswith(TAKE_ANYTHING):
                continue

            @given(case=operation.as_strategy(generation_mode=mode))
            @BOUNDED
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
                    # A lease may wait up to a minute, as it is asked to.
                    case.body["wait_seconds"] = min(case.body["wait_seconds"], 0.1)
                case.call_and_validate(timeout=IDLE_SECONDS, excluded_checks=not_promised)

            check()
    assert service.terminate() == 0
    assert "request failed" not in service.log
