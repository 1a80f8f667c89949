"""Imports libraries so that their ``except Exception`` lets MemoryError and RecursionError through.

math-verify takes any exception for "not equal". An answer that exhausts its memory or the stack would so come back as
wrong, a silent reward of 0, although its verdict is unknown. math-verify's ``raise_on_error`` does not reach its inner
handlers, so each handler gets a clause before it that raises the two exceptions again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType

_HANDLER = re.compile(rb"^([ \t]*)except Exception( as \w+)?:", re.MULTILINE)
_RAISE_FIRST = rb"\1except (MemoryError, RecursionError):\n\1    raise\n\1except Exception\2:"


@contextmanager
def let_through(*packages: str) -> Iterator[None]:
    """Compile modules of ``packages`` that are first imported within so that they let the two exceptions through."""
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] not in packages:
            return original(self, fullname)
        # Bytecode on disk is of the unchanged source, so it is neither read nor written.
        source = _HANDLER.sub(_RAISE_FIRST, self.get_data(self.path))
        code: CodeType = self.source_to_code(source, self.path)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]  # inherited from SourceLoader
    try:
        yield
    finally:
        SourceFileLoader.get_code = original  # type: ignore[method-assign]
