"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.core.settings import JsonObject, Settings


class GatewaySettings(Settings):
    """The gateway's environment variables."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    model_name: str = Field("Qwen/Qwen2.5-0.5B-Instruct", min_length=1)
    """Model whose tokenizer and chat template make the prompts, by hub name or directory."""
    gateway_dir: Path | None = None
    """Where the sessions are kept, on a disk of this machine; default `gateway` in the run directory."""
    chat_template_args: JsonObject = Field(default_factory=dict)
    """Arguments of the chat template as a JSON object, such as `{"enable_thinking": false}`. A request's own
    `chat_template_kwargs` win."""
    forced_tool_calls: Literal["refuse", "auto"] = "refuse"
    """What happens to a request that forces a tool call (`tool_choice` is `required`, `any` or a tool), because engines
    cannot promise one: `refuse` answers 400; `auto` lets the model choose, for libraries that take any answer."""
    engine_context_length: int | None = Field(None, ge=16)
    """Longest prompt and completion together, in tokens; default the model's."""

    @property
    def directory(self) -> Path:
        """The directory of the sessions."""
        return self.run_dir / "gateway" if self.gateway_dir is None else self.gateway_dir
