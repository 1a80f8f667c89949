"""The settings on which the files of a directory depend, so that a resumed run never mixes two kinds of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError
from services.core.files import atomic_write


def check_identity(path: Path, given: Mapping[str, Any], *, is_used: bool, holds: str, option: str) -> None:
    """Write ``given`` to ``path``, unless that file has other values and ``is_used`` says that there are results.

    Args:
        path: a JSON file in the directory.
        given: everything that the results in the directory depend on, by name.
        is_used: whether the directory has results.
        holds: phrase for results of other settings, such as "the samples of another evaluation".
        option: the option that names the directory.

    Raises:
        ConfigurationError: a value differs; the message has its name and both values.
    """
    content = json.dumps(given, indent=2) + "\n"
    # Through JSON, so that tuples compare equal to the lists that were written.
    identity: dict[str, Any] = json.loads(content)
    before = json.loads(path.read_text()) if is_used and path.exists() else identity
    for name in sorted({*before, *identity}):
        if before.get(name) != identity.get(name):
            raise ConfigurationError(
                f"{path.parent} holds {holds}: {name} was {before.get(name)!r} and is {identity.get(name)!r}; give "
                f"another {option}, or remove that directory"
            )
    atomic_write(path, content)
