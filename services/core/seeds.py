"""Seeds derived from one seed."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all ``parts`` and is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
