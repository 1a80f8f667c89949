"""The evaluation head's settings."""

from __future__ import annotations

import re

from pydantic import AnyHttpUrl, Field, SecretStr, TypeAdapter, field_validator

from services.core.endpoints import ENVIRONMENT_PORT
from services.core.settings import Settings

MAX_BATCH = 4096
"""Most states that a torch policy computes at once."""
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}=.+")


class HeadSettings(Settings):
    """Settings that the evaluation head reads from its environment."""

    head_policies: str = ""
    """The policies, as `name=target` with spaces between; the first is the default. A target is a `.pt2` file or a
    directory of versions `v000001/policy.pt2` (a torch module; `publish_policy`), the URL of a rollout server or router
    (a language model), or `module:function` (takes a list of states, returns actions)."""
    head_batch_size: int = Field(32, ge=1, le=MAX_BATCH)
    """States that a torch policy computes at once."""
    head_timeout_ms: float = Field(5.0, ge=0, le=10_000)
    """Longest time that a batch waits for more states, since its oldest state came or the last batch ended.
    [advanced]"""
    head_device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where torch policies run: `auto`, `cpu`, `cuda`, or `cuda:1`."""
    head_llm_model: str = Field("default", min_length=1)
    """The model that requests name. `default:policy` names the adapter of a run with LORA_RANK."""
    head_llm_concurrency: int = Field(64, ge=1)
    """Conversations sent to a rollout server at once. [advanced]"""
    head_llm_max_tokens: int = Field(512, ge=1)
    """Longest answer of a language model, in tokens."""

    game_server_prefix: str = Field("game-server", min_length=1, max_length=1000)
    """Clusters and SkyServe services whose names begin so are environment servers. Several prefixes have spaces or
    commas between."""
    game_server_port: int = Field(ENVIRONMENT_PORT, ge=1, le=65_535)
    """The port that clusters open for their environment server. [advanced]"""
    game_server_addresses: str = ""
    """Further environment servers, as `host:port` or URLs with spaces or commas between."""
    skypilot_api_server_endpoint: str | None = None
    """SkyPilot API server to ask for servers; without it only GAME_SERVER_ADDRESSES counts."""
    skypilot_service_account_token: SecretStr | None = None
    """Token for that API server, which SkyPilot's SDK reads."""

    head_drive_episodes: int = Field(8, ge=0, le=1024)
    """Episodes that the head plays at once on each discovered server; 0 leaves these servers alone. The first policy
    that fits the environment plays. Servers that push are never driven."""
    head_drive_total: int | None = Field(None, ge=1)
    """Episodes to play on each discovered server; by default without end. [advanced]"""

    @field_validator("head_policies")
    @classmethod
    def _policies_are_named(cls, text: str) -> str:
        parts = text.split()
        names = {part.split("=")[0] for part in parts}
        if len(names) < len(parts) or not all(_POLICY.fullmatch(part) for part in parts):
            raise ValueError("needed are name=target, with different names of letters, digits, '.', '_', '-'")
        if any("=head+" in part for part in parts):
            raise ValueError("a policy of another head is no target any more; name that policy's own target here")
        return text

    @field_validator("game_server_addresses")
    @classmethod
    def _are_addresses(cls, text: str) -> str:
        for url in _urls(text):
            TypeAdapter(AnyHttpUrl).validate_python(url)
        return text

    @property
    def policies(self) -> dict[str, str]:
        """Targets by policy name, in order."""
        return dict(part.split("=", 1) for part in self.head_policies.split())

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of GAME_SERVER_PREFIX."""
        return tuple(_listed(self.game_server_prefix))

    @property
    def addresses(self) -> list[str]:
        """The URLs of GAME_SERVER_ADDRESSES, each once."""
        return list(dict.fromkeys(url.rstrip("/") for url in _urls(self.game_server_addresses)))


def _listed(text: str) -> list[str]:
    return re.findall(r"[^\s,]+", text)


def _urls(text: str) -> list[str]:
    return [address if "://" in address else f"http://{address}" for address in _listed(text)]
