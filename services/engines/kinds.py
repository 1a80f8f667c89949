"""The table of engines, by their kind."""

from __future__ import annotations

from services.engines.engine import Engine
from services.engines.settings import EngineKind, RolloutSettings
from services.engines.sglang import Embedded, SGLang

ENGINES: dict[EngineKind, type[Engine]] = {EngineKind.SGLANG: SGLang, EngineKind.EMBEDDED: Embedded}

ROUTED: type[Engine] = SGLang
"""The engine whose requests and answers clients use, because the router forwards them unchanged: all engines behind it
share them. It is also the engine of a worker that was registered without a label, by somebody else than a launcher."""


def choose_engine(settings: RolloutSettings, n_gpus: int) -> type[Engine]:
    """Return the engine of ROLLOUT_ENGINE for a node with ``n_gpus`` GPUs."""
    kind = settings.rollout_engine
    if kind is EngineKind.AUTO:
        kind = EngineKind.SGLANG if n_gpus > 0 else EngineKind.EMBEDDED
    return ENGINES[kind]
