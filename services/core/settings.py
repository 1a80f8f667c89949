"""The base of every settings class: typed, read from environment variables, and strict.

Each service and the trainer has one subclass. The fields' descriptions are their documentation, from which
docs/configuration.md is generated. ``sky jobs launch jobgroup.yaml --env NAME=VALUE`` gives every task the same
variables, so a class ignores variables of the other classes. A value that is not allowed stops the program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.core.errors import ConfigurationError
from services.core.run_ids import default_run_id


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"give JSON ({error})") from error


JsonObject = Annotated[dict[str, JsonValue], NoDecode, BeforeValidator(_parsed)]
"""A setting that is a JSON object."""
JsonTexts = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_parsed)]
"""A setting that is a JSON list of texts."""


class Settings(BaseSettings):
    """The settings of every component."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True, allow_inf_nan=False)

    jobgroup_token: SecretStr | None = Field(
        default=None, description="When set, every route but /health asks for `Authorization: Bearer <token>`."
    )
    shared_dir: Path = Field(
        default=Path("shared-volume"), description="The volume that the nodes of a job share; holds `runs/`."
    )
    run_id: str = Field(
        default_factory=lambda given: default_run_id(given["shared_dir"]),
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run directory below `SHARED_DIR/runs`. Give a former run's name to resume it. "
        "Default: group, job and time of SKYPILOT_TASK_ID, such as grpo-17-20260131-120000, equal in all tasks of a "
        "managed job and after its recoveries.",
    )
    log_level: str = Field(
        default="info", pattern=r"^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_format: str = Field(
        default="text", pattern=r"^(text|json)$", description="`text`, or `json` for one object a line."
    )

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Return the settings of the environment and of ``overrides``: command-line flags, None if not given.

        Raises:
            ConfigurationError: a value is not allowed. The message has the name, the value and the allowed values.
        """
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except ValidationError as error:
            lines = [_describe(problem) for problem in error.errors()]
            raise ConfigurationError("; ".join(lines)) from error

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.shared_dir / "runs" / self.run_id

    @property
    def policy_dir(self) -> Path:
        """The directory of published policy versions, each a directory that is renamed into place."""
        return self.run_dir / "policy"

    @property
    def own_functions(self) -> dict[str, str]:
        """The values that name functions or classes of the user's own, by variable."""
        return {}

    @property
    def token(self) -> str | None:
        """The shared token in plain text, or None."""
        return self.jobgroup_token.get_secret_value() if self.jobgroup_token else None


def _describe(problem: Any) -> str:
    name, said = "_".join(str(part) for part in problem["loc"]).upper(), problem["msg"].removeprefix("Value error, ")
    if not name:  # a check of several settings, which names them itself
        return str(said)
    value = problem.get("input")
    shown = "" if value is None or isinstance(value, dict) or "TOKEN" in name or "KEY" in name else f" is {value!r}"
    return f"{name}{shown}: {said}"
