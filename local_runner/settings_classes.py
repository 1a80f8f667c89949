"""The settings classes of all components, and the tasks of a job group that read them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from services.core.endpoints import Task
from services.core.settings import Settings


@dataclass(frozen=True)
class Reader:
    """A settings class, by module and name, and the tasks whose components read it."""

    heading: str
    """The heading of its table in docs/configuration.md."""
    module: str
    name: str
    tasks: tuple[str, ...]

    def settings_class(self) -> type[Settings]:
        """Import and return the class."""
        found: type[Settings] = getattr(importlib.import_module(self.module), self.name)
        return found


READERS = (
    Reader("Trainer and collectors", "trainer.config", "TrainerSettings", (Task.TRAINER, Task.COLLECTOR)),
    Reader("data-server", "services.data_server.settings", "DataSettings", (Task.DATA_SERVER, "evaluate")),
    Reader("rollout-server", "services.rollout_server.settings", "RolloutSettings", (Task.ROLLOUT_SERVER,)),
    Reader("reward-server", "services.reward_server.settings", "RewardSettings", (Task.REWARD_SERVER,)),
    Reader("replay-buffer", "services.replay_buffer.settings", "ReplaySettings", (Task.REPLAY_BUFFER,)),
    Reader("gateway", "services.gateway.settings", "GatewaySettings", (Task.GATEWAY,)),
    Reader(
        "environment-server", "services.environment_server.settings", "EnvironmentSettings", (Task.ENVIRONMENT_SERVER,)
    ),
    Reader("evaluation-head", "services.evaluation_head.settings", "HeadSettings", (Task.EVALUATION_HEAD,)),
    Reader("Evaluation of checkpoints", "evaluation.settings", "EvaluationSettings", ("evaluate",)),
)
"""In the order of docs/configuration.md."""
