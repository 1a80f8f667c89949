"""Variables that earlier versions read: a program that finds one ends and says what to do instead."""

from __future__ import annotations

RETIRED: dict[str, str] = {}
"""By name: what holds now, or what to set instead."""
