"""The environment server's settings."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from pydantic import AnyHttpUrl, Field

from services.core.settings import DeadlineSettings, SourcesSettings
from services.core.sources import MAIN, Source

TEXT_TURNS = 10
"""Answers of an episode of a built-in text environment: enough to correct a mistake, and few enough for one context."""
MAX_STEPS = 10_000
"""Steps of an episode of another environment, which otherwise could go on without end."""
BUILT_IN = ("gsm8k", "guessing", "nim", "sandbox")


class EnvironmentSettings(SourcesSettings, DeadlineSettings):
    """Settings that the environment server reads from its environment."""

    environment: str = Field("CartPole-v1", min_length=1, max_length=100)
    """The environment that this server hosts, or one for each source in SOURCES that plays episodes: a gymnasium id,
    `module:Id` for an id that your module registers, `module:Class` for your Conversation, `gsm8k` (questions of
    DATASET, with a calculator), `sandbox` (tasks of DATASET that programs solve, and the tools of agents),
    `guessing` (a number to guess), `nim` (a game of two seats), or `openenv+http://host:port` for any OpenEnv
    server."""
    environment_server_name: str = Field(
        default_factory=lambda: default_name(), pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/@-]{0,99}$"
    )
    """Name of this server at the evaluation head; default the machine's name."""
    environment_max_steps: int | None = Field(None, ge=1)
    """An episode is truncated after this number of steps, also if its environment would continue it. Unset: 10 answers
    in `gsm8k`, `sandbox` and `guessing`, and 10,000 steps elsewhere."""
    environment_step_seconds: float = Field(30.0, gt=0)
    """Time limit of one reset or step; an episode that exceeds it is lost."""

    sandbox_disk_mb: int = Field(64, ge=1)
    """Megabytes of files that a box of `sandbox` may have; in memory where bubblewrap isolates it, and for a task of
    `harbor:DIR` in each directory that it writes to."""
    sandbox_trees: dict[str, Path] = Field(default_factory=dict)
    """Directory trees, such as debootstrap makes or `docker export` writes, by the image for whose tasks of
    `harbor:DIR` they stand: `{"python:3.12-slim": "/trees/py312"}`. Boxes of these tasks have the tree's programs, and
    its files in the directories that they may write to. Each has a Python of 3.11 or later in /usr. Boxes of other
    images have this machine's programs."""
    sandbox_image: str = ""
    """The image whose container this server runs in: of `harbor:DIR` it plays the tasks of this image alone, whose
    boxes have the image's programs, and its files in the directories that they may write to. `grpo launch` sets it."""
    sandbox_repeatable: bool = False
    """`true`: the programs of `sandbox` may be run again, so that the episodes of a lost server continue in new boxes
    on another one, if every output is the same. `false`: nothing runs twice, and these episodes are lost."""

    eval_head_endpoint: AnyHttpUrl | None = None
    """Address of an evaluation head, `http://host:8080`. When set, this server plays episodes by itself and asks that
    head for the actions."""
    environment_push_episodes: int = Field(8, ge=1, le=1024)
    """Episodes played at once with EVAL_HEAD_ENDPOINT."""
    environment_push_total: int | None = Field(None, ge=1)
    """Episodes to play with EVAL_HEAD_ENDPOINT; by default without end. [advanced]"""

    @property
    def most_steps(self) -> int:
        """Steps after which an episode is truncated."""
        return self.environment_max_steps or MAX_STEPS

    @property
    def text_turns(self) -> int:
        """Answers that a built-in text environment allows before the episode is truncated."""
        return self.environment_max_steps or TEXT_TURNS

    @property
    def own_functions(self) -> dict[str, str]:
        """ENVIRONMENT of each source that plays one, unless it always works or is on another server."""
        return {
            f"ENVIRONMENT of {source}" if source else "ENVIRONMENT": name
            for source, name in self.environments.items()
            if (name not in BUILT_IN or name == "sandbox") and "://" not in name
        }

    @property
    def environments(self) -> dict[str, str]:
        """The environment of each source that plays one, by the source's name; ENVIRONMENT by "" where none does."""

        def played(own: EnvironmentSettings, source: Source) -> str | None:
            # ROLLOUT is the trainer's. A source without one of its own may play the ENVIRONMENT that is set here.
            may_play = source is MAIN or "environment" in own.model_fields_set
            rollout = source.settings.get("rollout", "environment" if may_play else "")
            return own.environment if rollout == "environment" else None

        return {source: name for source, name in self.of_sources(played).items() if name} or {"": self.environment}


def default_name() -> str:
    """Return the machine's name without the characters that a server's name may not have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:100] or "environment-server"
