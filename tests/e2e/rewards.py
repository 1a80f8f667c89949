"""A reward function that fails, and one that needs no knowledge."""


def always_fails(response: str) -> float:
    """Raise an error at every answer."""
    raise LookupError(f"nothing like {response[:0]!r} is right")


def odd_length(response: str) -> float:
    """Reward an odd number of characters."""
    return float(len(response) % 2)
