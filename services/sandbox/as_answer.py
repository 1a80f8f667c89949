"""Runs a program of an answer for tests: it can neither read them, nor write their verdict, nor signal them.

The tests of a box find the words before such a program in the variable AS_ANSWER. Standard library only.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a program, behind the directories that it may read and those that it may write to, joined by colons."""
    sys.path.insert(0, os.path.dirname(__file__))
    import kernel  # type: ignore[import-not-found]

    readable, places = (words.split(":") for words in sys.argv[1:3])
    kernel.keep_to_files(readable, places)
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
