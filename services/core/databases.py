"""Damaged SQLite files: the error that ends their service."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from services.core.errors import ConfigurationError


def damage(error: BaseException, file: Path, loss: str) -> ConfigurationError | None:
    """Return the error that ends a service whose SQLite file is damaged; None for an error of another cause.

    Args:
        error: what SQLite raised.
        file: the damaged file.
        loss: what the user loses without the file, as the end of the message.
    """
    # Other causes have a subclass: a full disk, a lock, a statement that cannot be executed.
    is_damage = type(error) is sqlite3.DatabaseError or "Could not decode to UTF-8" in str(error)
    if not is_damage or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return None
    return ConfigurationError(
        f"{str(file)!r} is damaged: {error}; see whether its disk is well, move its directory away and start again: "
        f"{loss}"
    )
