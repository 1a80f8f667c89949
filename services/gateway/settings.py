"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from services.core.endpoints import node_rank
from services.core.settings import ContextSettings, ModelSettings, TemplateSettings


class GatewaySettings(ModelSettings, TemplateSettings, ContextSettings):
    """The gateway's environment variables."""

    gateway_dir: Path | None = None
    """Where the sessions are kept, on a disk of this machine; default `gateway` in the run directory. Of several nodes,
    all but the first append their rank: `gateway-1`. [advanced]"""
    forced_tool_calls: Literal["refuse", "auto"] = "refuse"
    """Treatment of a request that forces a tool call (`tool_choice` is `required`, `any` or a tool) or bounds a turn
    to one (`parallel_tool_calls` is false), because engines cannot promise it: `refuse` answers 400; `auto` lets the
    model choose, for libraries that take any answer."""

    @property
    def directory(self) -> Path:
        """The directory of the sessions."""
        first = self.run_dir / "gateway" if self.gateway_dir is None else self.gateway_dir
        rank = node_rank()
        return first.with_name(f"{first.name}-{rank}") if rank else first
