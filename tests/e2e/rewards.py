"""Reward functions that fail."""


def always_fails(response: str) -> float:
    """Raise an error at every answer."""
    raise LookupError(f"nothing like {response[:0]!r} is right")
