"""The evaluation head's settings."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import AnyHttpUrl, Field, SecretStr, TypeAdapter, field_validator

from services.core.endpoints import ENVIRONMENT_PORT
from services.core.settings import Settings

POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class HeadSettings(Settings):
    """What the evaluation head reads from its environment."""

    head_policies: str = Field(
        default="",
        description="The policies, as `name=target` with spaces between; the first is the default. A target is a "
        "`.pt2` file or a directory of versions `v000001/policy.pt2` (a torch module, see `save_policy`), or the URL "
        "of a rollout server or router (a language model).",
    )
    head_batch_size: int = Field(default=32, ge=1, le=65_536, description="States that a torch policy sees at once.")
    head_timeout_ms: float = Field(
        default=5.0, ge=0, le=10_000, description="So long a state waits for others to share its batch."
    )
    head_max_waiting: int = Field(
        default=4096, ge=1, description="States that wait for one policy; further requests are refused with 429."
    )
    head_device: str = Field(
        default="auto", description="Where torch policies run: `auto`, `cpu`, `cuda`, or `cuda:1`."
    )
    head_reload_seconds: float = Field(
        default=5.0, gt=0, description="How often new checkpoint versions are looked for."
    )
    head_llm_concurrency: int = Field(default=64, ge=1, description="Conversations that a rollout server gets at once.")
    head_llm_max_tokens: int = Field(default=512, ge=1, description="Tokens that a language model may say at a time.")
    head_llm_temperature: float = Field(default=0.0, ge=0, le=10, description="Of a language model; 0 is greedy.")
    head_llm_seconds: float = Field(default=120.0, gt=0, description="A language model's answer may take that long.")

    game_server_prefix: str = Field(
        default="game-server",
        min_length=1,
        max_length=100,
        description="Clusters and SkyServe services whose names begin so are environment servers.",
    )
    game_server_port: int = Field(
        default=ENVIRONMENT_PORT,
        ge=1,
        le=65_535,
        description="The port that clusters open for their environment server.",
    )
    game_server_addresses: str = Field(
        default="",
        description="Environment servers to use besides, as `host:port` or URLs with spaces or commas between.",
    )
    skypilot_api_server_endpoint: str | None = Field(
        default=None,
        description="SkyPilot API server to ask for servers; without it only GAME_SERVER_ADDRESSES counts.",
    )
    skypilot_service_account_token: SecretStr | None = Field(
        default=None, description="Token for that API server, which SkyPilot's SDK reads."
    )
    discovery_seconds: float = Field(default=30.0, gt=0, description="How often environment servers are looked for.")
    discovery_timeout_seconds: float = Field(
        default=60.0, gt=0, description="What SkyPilot's API server has not told by then counts as an error."
    )

    head_drive: Literal["on", "off"] = Field(
        default="on", description="Whether the head plays on discovered servers that do not push by themselves."
    )
    head_drive_episodes: int = Field(default=8, ge=1, le=1024, description="Episodes at once on each of those servers.")
    head_drive_total: int | None = Field(
        default=None, ge=1, description="Episodes to play on each of those servers; default without end."
    )
    head_drive_policy: str | None = Field(
        default=None, description="Which policy plays there; default the first that fits the environment."
    )
    head_drive_seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the first episode on each server.")
    head_max_episode_steps: int = Field(
        default=100_000, ge=1, description="The head gives up an episode that has not ended after that many steps."
    )
    head_probe_seconds: float = Field(default=5.0, gt=0, description="How often a discovered server's health is asked.")
    head_silent_seconds: float = Field(
        default=15.0, gt=0, description="A pushing server that says nothing for that long is silent; its name is free."
    )
    head_episode_idle_seconds: float = Field(
        default=300.0, gt=0, description="A pushed episode that nothing is heard of for that long counts as lost."
    )

    @field_validator("head_policies")
    @classmethod
    def _policies_are_named(cls, text: str) -> str:
        names = []
        for part in text.split():
            name, separator, target = part.partition("=")
            if not separator or not target or not POLICY_NAME.fullmatch(name):
                raise ValueError(
                    f"{part!r} is not of the form name=target, with a name of letters, digits, '.', '_', '-'"
                )
            names.append(name)
        if len(set(names)) < len(names):
            raise ValueError("a policy's name occurs twice")
        return text

    @field_validator("game_server_addresses")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        for address in re.split(r"[\s,]+", text.strip()) if text.strip() else []:
            TypeAdapter(AnyHttpUrl).validate_python(address if "://" in address else f"http://{address}")
        return text

    @property
    def policies(self) -> dict[str, str]:
        """Targets by policy name, in order."""
        return dict(part.split("=", 1) for part in self.head_policies.split())

    @property
    def addresses(self) -> list[str]:
        """The URLs of GAME_SERVER_ADDRESSES."""
        found = [address for address in re.split(r"[\s,]+", self.game_server_addresses) if address]
        return [(a if "://" in a else f"http://{a}").rstrip("/") for a in dict.fromkeys(found)]
