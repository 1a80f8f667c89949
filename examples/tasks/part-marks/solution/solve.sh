#!/bin/sh
cat > /app/tidy.py <<'END'
def tidy(text):
    """Return ``text`` in lower case, with single spaces."""
    return " ".join(text.split()).lower() or "untitled"
END
