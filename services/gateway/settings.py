"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from services.core.settings import ContextSettings, ModelSettings, TemplateSettings


class GatewaySettings(ModelSettings, TemplateSettings, ContextSettings):
    """The gateway's environment variables."""

    gateway_dir: Path | None = None
    """Where the sessions are kept, on a disk of this machine; default `gateway` in the run directory. [advanced]"""
    forced_tool_calls: Literal["refuse", "auto"] = "refuse"
    """What happens to a request that forces a tool call (`tool_choice` is `required`, `any` or a tool), because engines
    cannot promise one: `refuse` answers 400; `auto` lets the model choose, for libraries that take any answer."""

    @property
    def directory(self) -> Path:
        """The directory of the sessions."""
        return self.run_dir / "gateway" if self.gateway_dir is None else self.gateway_dir
