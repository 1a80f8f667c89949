#!/bin/sh
cat > /app/middle.py <<'END'
def middle(numbers):
    """Return the median of ``numbers``."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
END
